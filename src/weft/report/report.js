"use strict";
// One page for one report or several: views are made from the data when they are first opened.
const reports = JSON.parse(document.getElementById("data").textContent);
const main = document.querySelector("main"), nav = document.querySelector("nav"), tip = document.getElementById("tip");
document.querySelector("h1").textContent = reports.map((each) => each.title).join("  |  ");

function make(tag, options = {}, ...children) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "text") found.textContent = value;
    else if (name.startsWith("on")) found.addEventListener(name.slice(2), value);
    else if (name === "style") found.style.cssText = value;
    else found.setAttribute(name, value);
  }
  found.append(...children);
  return found;
}
const seconds = (x) => x == null ? "" : x >= 1 ? x.toFixed(3) + " s" : x >= 1e-3 ? (1e3 * x).toFixed(3) + " ms" : (1e6 * x).toFixed(1) + " µs";
const micros = (x) => seconds(x / 1e6);
function bytes(x) {
  if (x == null) return "";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (x >= 1024 && place < 4) { x /= 1024; place++; }
  return (place ? x.toFixed(1) : x) + " " + units[place];
}
const percent = (x) => (100 * x).toFixed(1) + " %";
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

// A table whose columns are sorted by a click. Columns: [head, value(row), text(value, row), number?]
function table(rows, columns, marked = () => false) {
  const body = make("tbody");
  let by = -1, down = false;
  function fill() {
    const sorted = [...rows];
    if (by >= 0) sorted.sort((a, b) => { const x = columns[by][1](a), y = columns[by][1](b); return (x > y ? 1 : x < y ? -1 : 0) * (down ? -1 : 1); });
    body.replaceChildren(...sorted.map((row) => make("tr", marked(row) ? { class: "best" } : {}, ...columns.map(([, value, text, number]) => {
      const found = text ? text(value(row), row) : value(row);
      return make("td", number ? { class: "number" } : {}, found instanceof Node ? found : String(found ?? ""));
    }))));
  }
  const head = make("tr", {}, ...columns.map(([name, , , number], place) => make("th", { text: name, tabindex: "0", ...(number ? { class: "number" } : {}), onclick: () => { down = by === place && !down; by = place; fill(); } })));
  fill();
  return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, head), body));
}
function show(event, text) { tip.hidden = !text; tip.textContent = text || ""; tip.style.left = Math.min(event.clientX + 14, innerWidth - 430) + "px"; tip.style.top = event.clientY + 14 + "px"; }

// ------------------------------------------------------------------------------------------ summary
function summary(report) {
  const found = [];
  if (report.notes.length) found.push(make("pre", { text: report.notes.join("\n") }));
  const given = report.summary;
  if (!given.text) return found;
  found.push(make("pre", { text: given.text.join("\n") }));
  const parts = ["compute", "hidden", "exposed", "idle"], colors = { compute: "compute", hidden: "memory", exposed: "communication", idle: "wait" };
  found.push(make("h2", { text: "Where the time of a step goes" }), make("div", { class: "legend" }, ...parts.map((name) => make("span", {}, make("i", { style: "background:var(--" + colors[name] + ")" }), name))));
  found.push(table(given.ranks, [
    ["rank", (x) => x.rank, null, true], ["stands for", (x) => x.count, null, true], ["step", (x) => x.step, seconds, true],
    ["", () => 0, (_, x) => make("div", { class: "bar" }, ...[["compute", x.compute], ["communication", x.exposed], ["wait", x.idle]].map(([name, part]) => make("i", { style: "width:" + 100 * part / (x.step || 1) + "%;background:var(--" + name + ")" })))],
    ["compute", (x) => x.compute, seconds, true], ["communication", (x) => x.communication, seconds, true], ["exposed", (x) => x.exposed, seconds, true], ["idle", (x) => x.idle, seconds, true], ["bubble", (x) => x.bubble, percent, true],
  ]));
  found.push(make("h2", { text: "Largest costs" }), table(given.costs, [["what", (x) => x.what], ["where", (x) => x.where], ["times", (x) => x.times, null, true], ["seconds", (x) => x.seconds, seconds, true], ["", (x) => x.estimated, (x) => x ? "estimated" : ""]]));
  found.push(make("h2", { text: "Critical path of a step" }), table(given.path, [["begin", (x) => x.start, seconds, true], ["seconds", (x) => x.end - x.start, seconds, true], ["rank", (x) => x.rank, null, true], ["queue", (x) => x.queue], ["micro-batch", (x) => x.micro, null, true], ["act", (x) => x.name]]));
  return found;
}

// ------------------------------------------------------------------------------------------ model
function sbpGrid(row) {
  // A square for each rank along an axis: the parts of a split differ, copies are alike.
  return make("span", {}, ...row.layout.map((sbp, axis) => {
    const ranks = row.grid[axis], shown = Math.min(ranks, 16), kind = sbp[0] === "S" ? "split" : sbp[0] === "P" ? "partial" : "broadcast";
    return make("span", { class: "grid", title: sbp + " along axis " + axis + " of " + ranks + " ranks", style: "grid-template-columns:repeat(" + Math.min(shown, 8) + ",9px)" },
      ...Array.from({ length: shown }, (_, n) => make("i", { style: "background:var(--" + kind + ");opacity:" + (kind === "split" ? 0.45 + 0.55 * n / Math.max(1, shown - 1) : 1) })));
  }), row.layout.join(", "));
}
function model(report) {
  const root = { children: new Map(), rows: [], bytes: 0 };
  for (const row of report.model) {
    let node = root;
    node.bytes += row.bytes || 0;
    for (const part of row.path ? row.path.split(".") : []) {
      if (!node.children.has(part)) node.children.set(part, { children: new Map(), rows: [], bytes: 0 });
      node = node.children.get(part);
      node.bytes += row.bytes || 0;
    }
    node.rows.push(row);
  }
  const side = make("div", { class: "dim", text: "Choose a module or a parameter." });
  let chosen = null;
  function choose(element, path, rows) {
    if (chosen) chosen.classList.remove("chosen");
    (chosen = element).classList.add("chosen");
    side.className = "";
    side.replaceChildren(make("h2", { text: path || "outside of modules" }), ...rows.flatMap((row) => row.role === "module"
      ? [make("p", {}, make("b", { text: "lines " }), row.lines.join(", ")), table(Object.entries(row.ops), [["op", (x) => x[0]], ["calls", (x) => x[1], null, true]])]
      : [make("p", { text: row.role + " " + row.dtype + "[" + row.shape.join(", ") + "], " + bytes(row.bytes) }), make("p", {}, sbpGrid(row)), make("p", { class: "dim", text: "on ranks " + row.ranks.slice(0, 32).join(", ") + (row.ranks.length > 32 ? ", …" : "") })]));
  }
  function branch(name, node, path) {
    const text = [make("b", { text: name }), " ", make("span", { class: "dim", text: node.bytes ? bytes(node.bytes) : "" }), " "];
    const leaf = node.rows.find((row) => row.layout);
    if (leaf && leaf.layout.length) text.push(sbpGrid(leaf));
    if (!node.children.size) {
      const item = make("div", { class: "leaf", tabindex: "0" }, ...text);
      item.addEventListener("click", () => choose(item, path, node.rows));
      return make("li", {}, item);
    }
    const head = make("summary", {}, ...text), list = make("ul");
    const found = make("details", path.split(".").length < 2 ? { open: "" } : {}, head, list);
    const open = () => { if (!list.childElementCount) list.append(...[...node.children].map(([key, child]) => branch(key, child, path + "." + key))); };
    if (found.open) open();
    found.addEventListener("toggle", open);
    head.addEventListener("click", () => choose(head, path, node.rows));
    return make("li", {}, found);
  }
  const legend = make("div", { class: "legend" }, ...["split", "broadcast", "partial"].map((name) => make("span", {}, make("i", { style: "background:var(--" + name + ")" }), name)));
  return [legend, make("div", { class: "tree" }, make("div", {}, make("ul", {}, ...[...root.children].map(([key, child]) => branch(key, child, key)))), side)];
}

// ------------------------------------------------------------------------------------------ time
const ROW = 18, GAP = 6, HEAD = 26;
function drawing(height, draw) {
  const canvas = make("canvas", { style: "height:" + height + "px" });
  function paint() {
    const ratio = devicePixelRatio || 1, width = canvas.clientWidth || 800;
    canvas.width = width * ratio; canvas.height = height * ratio;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.clearRect(0, 0, width, height);
    context.font = "12px system-ui, sans-serif";
    draw(context, width);
  }
  new ResizeObserver(paint).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  return [canvas, paint];
}
function timelines(report) {
  const lanes = [];
  for (const each of report.timelines) each.queues.forEach((queue, place) => lanes.push({
    name: each.group + " rank " + each.rank + " " + queue, slices: each.slices.filter((slice) => slice[0] === place).sort((a, b) => a[1] - b[1]),
  }));
  const end = Math.max(1e-3, ...report.timelines.flatMap((each) => each.slices.map((slice) => slice[1] + slice[2])));
  const path = report.summary.path || [];
  let from = 0, to = end;
  const LEFT = 210, height = HEAD + lanes.length * (ROW + GAP) + 8;
  const place = (x, width) => LEFT + (x - from) / (to - from) * (width - LEFT);
  const [canvas, paint] = drawing(height, (context, width) => {
    const colors = Object.fromEntries(["compute", "communication", "host", "wait", "text", "dim", "line", "back", "mark"].map((name) => [name, color(name)]));
    const step = 10 ** Math.floor(Math.log10((to - from) / 4)), every = [1, 2, 5, 10].map((x) => x * step).find((x) => (to - from) / x <= 8) || step;
    context.strokeStyle = colors.line; context.fillStyle = colors.dim;
    for (let t = Math.ceil(from / every) * every; t <= to; t += every) { const x = place(t, width); context.beginPath(); context.moveTo(x, HEAD - 6); context.lineTo(x, height); context.stroke(); context.fillText(micros(t), x + 3, 14); }
    lanes.forEach((lane, row) => {
      const y = HEAD + row * (ROW + GAP);
      let last = -1;
      for (const [, begin, took, kind, name] of lane.slices) {
        if (begin > to || begin + took < from) continue;
        const left = Math.max(LEFT, place(begin, width)), right = Math.min(width, place(begin + took, width));
        if (right - left < 0.6 && right <= last) continue; // nothing of it would be seen
        last = Math.max(right, left + 0.6);
        context.fillStyle = colors[kind] || colors.host;
        context.globalAlpha = kind === "wait" ? 0.35 : 1;
        context.fillRect(left, y, Math.max(0.6, right - left), ROW);
        context.globalAlpha = 1;
        if (right - left > 60) { context.save(); context.beginPath(); context.rect(left, y, right - left, ROW); context.clip(); context.fillStyle = "#ffffff"; context.fillText(name, left + 4, y + 13); context.restore(); }
      }
      context.fillStyle = colors.back; context.fillRect(0, y - GAP / 2, LEFT - 4, ROW + GAP);
      context.fillStyle = colors.text; context.fillText(lane.name.length > 32 ? lane.name.slice(0, 31) + "…" : lane.name, 6, y + 13);
    });
  });
  function at(event) {
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, row = Math.floor((event.clientY - box.top - HEAD) / (ROW + GAP));
    return { time: from + (x - LEFT) / (box.width - LEFT) * (to - from), lane: lanes[row], inside: x > LEFT };
  }
  canvas.addEventListener("mousemove", (event) => {
    const { time, lane, inside } = at(event);
    const found = inside && lane && lane.slices.find((slice) => slice[1] <= time && time <= slice[1] + slice[2]);
    show(event, found ? found[4] + ": " + micros(found[2]) + " from " + micros(found[1]) + (found[5] ? "; " + found[5] : "") : "");
  });
  canvas.addEventListener("mouseleave", (event) => show(event, ""));
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const { time } = at(event), by = Math.exp(event.deltaY / 400), width = Math.min(end, (to - from) * by);
    from = Math.max(0, Math.min(end - width, time - (time - from) * width / (to - from))); to = from + width;
    paint();
  }, { passive: false });
  let held = null;
  canvas.addEventListener("pointerdown", (event) => { held = [event.clientX, from]; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => { if (!held) return; const width = to - from; from = Math.max(0, Math.min(end - width, held[1] - (event.clientX - held[0]) / (canvas.clientWidth - LEFT) * width)); to = from + width; paint(); });
  canvas.addEventListener("pointerup", () => { held = null; });
  const whole = make("button", { class: "plain", text: "whole step", onclick: () => { from = 0; to = end; paint(); } });
  const legend = make("div", { class: "legend" }, ...["compute", "communication", "host", "wait"].map((name) => make("span", {}, make("i", { style: "background:var(--" + name + ")" }), name)), make("span", { text: "wheel: closer; drag: along" }), whole);
  return [legend, canvas, ...(path.length ? [make("p", { class: "dim", text: "The critical path stands in the summary." })] : [])];
}

// ------------------------------------------------------------------------------------------ memory
function memory(report) {
  const found = [];
  for (const each of report.timelines.filter((one) => one.levels.length)) {
    const levels = each.levels, most = Math.max(...levels.map((level) => level[1])), end = Math.max(levels[levels.length - 1][0], ...each.steps.map((step) => step[2]));
    const top = levels.find((level) => level[1] === most);
    const [canvas] = drawing(160, (context, width) => {
      const x = (t) => t / end * width, y = (size) => 150 - size / most * 130;
      context.fillStyle = color("memory"); context.globalAlpha = 0.5; context.beginPath(); context.moveTo(0, 150);
      let last = 0;
      for (const [time, size] of levels) { context.lineTo(x(time), y(last)); context.lineTo(x(time), y(size)); last = size; }
      context.lineTo(width, y(last)); context.lineTo(width, 150); context.fill(); context.globalAlpha = 1;
      context.fillStyle = color("text"); context.fillText(bytes(most) + " at " + micros(top[0]), Math.min(x(top[0]) + 4, width - 160), 14);
    });
    canvas.addEventListener("mousemove", (event) => {
      const box = canvas.getBoundingClientRect(), time = (event.clientX - box.left) / box.width * end;
      const now = levels.filter((level) => level[0] <= time).pop();
      show(event, now ? bytes(now[1]) + " at " + micros(time) : "");
    });
    canvas.addEventListener("mouseleave", (event) => show(event, ""));
    found.push(make("h2", { text: each.group + " rank " + each.rank }), canvas);
  }
  const held = report.summary.memory;
  if (held) found.unshift(make("p", { text: "The fullest rank is " + held.rank + ": " + bytes(held.planned) + " of tensors and " + bytes(held.reserve) + " that its device takes beyond" + (held.capacity ? ", of " + bytes(held.capacity) : "") + "." }));
  return found;
}

// ------------------------------------------------------------------------------------------ search
function search(report) {
  const given = report.search, marked = (x) => x.outcome === "best";
  const tried = given.tried.map((each, order) => ({ ...each, order }));
  return [
    make("p", { text: "The best takes " + seconds(given.seconds) + " a step; no strategy of the space takes less than " + seconds(given.bound) + ", " + percent(given.gap) + " below." }),
    make("h2", { text: "Why not" }), table(given.why, [["kind", (x) => x.kind], ["strategy", (x) => x.name], ["step", (x) => x.seconds, seconds, true], ["memory", (x) => x.memory, bytes, true], ["known", (x) => x.known], ["loses by", (x) => x.why]]),
    make("h2", { text: "Tried" }), table(tried, [["", (x) => x.order, (x) => x + 1, true], ["strategy", (x) => x.name], ["step", (x) => x.seconds ?? Infinity, (x) => x === Infinity ? "" : seconds(x), true], ["memory", (x) => x.memory ?? Infinity, (x) => x === Infinity ? "" : bytes(x), true], ["by hand", (x) => x.by_hand, (x) => x ? "yes" : ""], ["outcome", (x) => x.outcome], ["why", (x) => x.why]], marked),
    make("h2", { text: "Not planned, not searched" }), make("ul", {}, ...Object.entries(given.skipped).filter(([, count]) => count).map(([why, count]) => make("li", { text: count + ": " + why })), ...given.not_searched.map((each) => make("li", { text: "not searched: " + each }))),
    make("h2", { text: "The best strategy, as a file" }), make("pre", { text: given.best }),
  ];
}

// ------------------------------------------------------------------------------------------ views
const VIEWS = [
  ["Summary", summary, (x) => x.summary.text || x.notes.length], ["Model", model, (x) => x.model.length],
  ["Time", timelines, (x) => x.timelines.length], ["Memory", memory, (x) => x.timelines.some((each) => each.levels.length)],
  ["Search", search, (x) => x.search.tried],
].filter(([, , there]) => reports.some(there));
VIEWS.forEach(([name, view, there], number) => {
  const section = make("section", { role: "tabpanel", id: "view-" + name.toLowerCase(), hidden: "" });
  const button = make("button", { role: "tab", text: name, "aria-selected": "false", "aria-controls": section.id, onclick: open });
  function open() {
    history.replaceState(null, "", "#" + name.toLowerCase());
    nav.querySelectorAll("button").forEach((each) => each.setAttribute("aria-selected", String(each === button)));
    main.querySelectorAll("section").forEach((each) => { each.hidden = each !== section; });
    if (section.childElementCount) return;
    const sides = reports.map((report) => make("div", {}, ...(reports.length > 1 ? [make("h2", { text: report.title })] : []), ...(there(report) ? view(report) : [make("p", { class: "dim", text: "not in this report" })])));
    section.append(reports.length > 1 ? make("div", { class: "side" }, ...sides) : sides[0]);
  }
  nav.append(button);
  main.append(section);
  if (location.hash ? location.hash === "#" + name.toLowerCase() : !number) open();
});
document.documentElement.dataset.ready = "yes";
