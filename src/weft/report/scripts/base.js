"use strict";
// One page for one report or several: a view is made from the data when it is first opened.
const reports = JSON.parse(document.getElementById("data").textContent);
const main = document.querySelector("main"),
  nav = document.querySelector("nav"),
  tip = document.getElementById("tip");
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
// Units of time: the name, how many a second has, digits behind the point, and the least that is said in it.
const TIMES = [
  ["s", 1, 3, 1],
  ["ms", 1e3, 3, 1],
  ["µs", 1e6, 1, 0.1],
  ["ns", 1e9, 1, 0.1],
];
function seconds(x) {
  if (x == null) return "";
  for (const [unit, times, digits, least] of TIMES) {
    const text = (x * times).toFixed(digits);
    if (Math.abs(text) >= least) return text + " " + unit;
  }
  return "0";
}
// Times of timelines and of memory are in tenths of a microsecond.
const ticks = (x) => seconds(x / 1e7);
function bytes(x) {
  if (x == null) return "";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let place = 0;
  while (x >= 1024 && place < 5) {
    x /= 1024;
    place++;
  }
  return (place ? x.toFixed(1) : Math.round(x)) + " " + units[place];
}
// Of many values too: they are too many for the arguments of Math.max.
const highest = (values, least = -Infinity) => values.reduce((a, b) => Math.max(a, b), least);
// Texts of an axis whose marks are so far apart and end so far out: one unit, and as many digits as tell marks apart.
const digitsOf = (apart) => Math.max(0, -Math.floor(Math.log10(apart) + 1e-9));
function timeAxis(apart, most) {
  const [unit, times] = TIMES.find(([, times]) => most * times >= 1) || TIMES[TIMES.length - 1];
  return (x) => (x * times).toFixed(digitsOf(apart * times)) + " " + unit;
}
const tickAxis = (apart, most) => {
  const text = timeAxis(apart / 1e7, most / 1e7);
  return (x) => text(x / 1e7);
};
function numberAxis(apart, most) {
  if (most && (most >= 1e7 || most < 1e-4))
    return (x) =>
      x
        ? x.toExponential(
            Math.max(0, Math.floor(Math.log10(Math.abs(x)) + 1e-9) - Math.floor(Math.log10(apart) + 1e-9)),
          )
        : "0";
  const digits = digitsOf(apart);
  return (x) => x.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}
const percent = (x) => (x == null ? "" : (100 * x).toFixed(1) + " %");
const number = (x) => (x == null ? "" : Number(x).toLocaleString("en-US", { maximumSignificantDigits: 6 }));
const ranksText = (spans) => spans.map(([a, b]) => (a === b ? a : a + " to " + b)).join(", ");
const color = (name) =>
  getComputedStyle(document.documentElement)
    .getPropertyValue("--" + name)
    .trim();
const colors = (...names) => Object.fromEntries(names.map((name) => [name, color(name)]));

// As many rows of a table are shown at first.
const ROWS = 200;
// A table whose columns are sorted by a click. Columns: [head, value(row), text(value, row), number?]
function table(rows, columns, options = {}) {
  const body = make("tbody");
  let by = -1,
    down = false,
    shown = ROWS;
  const more = make("button", {
    class: "plain",
    onclick: () => {
      shown = Infinity;
      fill();
    },
  });
  function cells(row) {
    return columns.map(([, value, text, isNumber]) => {
      const found = text ? text(value(row), row) : value(row);
      return make("td", isNumber ? { class: "number" } : {}, found instanceof Node ? found : String(found ?? ""));
    });
  }
  function fill() {
    const sorted = [...rows];
    if (by >= 0)
      sorted.sort((a, b) => {
        const x = columns[by][1](a),
          y = columns[by][1](b);
        if (x == null || y == null) return (x == null) - (y == null); // what is not known comes last, either way
        return (x > y ? 1 : x < y ? -1 : 0) * (down ? -1 : 1);
      });
    body.replaceChildren(
      ...sorted.slice(0, shown).map((row) => {
        const line = make("tr", options.marked?.(row) ? { class: "best" } : {}, ...cells(row));
        if (options.chosen) {
          line.classList.add("click");
          line.addEventListener("click", () => options.chosen(row));
        }
        return line;
      }),
    );
    more.hidden = rows.length <= shown;
    more.textContent = "all " + rows.length + " rows";
    heads.forEach((head, place) =>
      head.setAttribute("aria-sort", place !== by ? "none" : down ? "descending" : "ascending"),
    );
  }
  const heads = columns.map(([name, , , isNumber], place) => {
    const sort = () => {
      down = by === place && !down;
      by = place;
      fill();
    };
    return make("th", {
      text: name,
      ...(isNumber ? { class: "number" } : {}),
      ...(name
        ? {
            tabindex: "0",
            onclick: sort,
            onkeydown: (event) => {
              if (event.key === "Enter" || event.key === " ") {
                event.preventDefault();
                sort();
              }
            },
          }
        : {}),
    });
  });
  fill();
  return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...heads)), body), more);
}
function show(event, text) {
  tip.hidden = !text;
  tip.textContent = text || "";
  if (!text) return;
  tip.style.left = Math.max(8, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top =
    (event.clientY + 18 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18) +
    "px";
}
const legend = (...entries) =>
  make(
    "div",
    { class: "legend" },
    ...entries.map((entry) =>
      entry instanceof Node
        ? entry
        : make("span", {}, make("i", { style: "background:var(--" + entry[0] + ")" }), entry[1]),
    ),
  );
const fold = (name, ...children) => make("details", {}, make("summary", { text: name }), ...children);

// The step that the views of a report show: its place among the steps, or null for all.
function steps(report) {
  if (!report.choice) {
    const groups = report.time,
      most = groups.reduce((a, b) => (b.steps.length > a.steps.length ? b : a), groups[0] || { steps: [] });
    report.choice = { steps: most.steps, place: most.steps.length ? most.steps.length - 1 : null, listeners: [] };
  }
  return report.choice;
}
function stepOf(report, group) {
  // The step of a group that belongs to the chosen one: of that number, else its last.
  const { steps: all, place } = steps(report),
    own = group.steps;
  if (place === null || !own.length) return null;
  return own.find(([number]) => number === all[place][0]) || own[own.length - 1];
}
function stepSlider(report) {
  // A slider, and the length of each step as a bar.
  const choice = steps(report);
  if (choice.steps.length < 2) return [];
  const longest = highest(
    choice.steps.map(([, a, b]) => b - a),
    1,
  );
  const text = make("output"),
    range = make("input", { type: "range", min: 0, max: choice.steps.length - 1, "aria-label": "step" });
  function choose(place) {
    choice.place = place;
    choice.listeners.forEach((each) => each());
  }
  const all = make("button", { class: "plain", text: "all steps", onclick: () => choose(null) });
  const [bars, paint] = drawing(
    36,
    (context, width) => {
      const found = colors("broadcast", "mark"),
        each = width / choice.steps.length;
      choice.steps.forEach(([, a, b], place) => {
        const high = Math.max(1, (34 * (b - a)) / longest);
        context.fillStyle = place === choice.place || choice.place === null ? found.mark : found.broadcast;
        context.fillRect(place * each, 36 - high, Math.max(each - 1, 0.5), high);
      });
    },
    "the length of each step",
  );
  const placeOf = (event) =>
    Math.max(
      0,
      Math.min(choice.steps.length - 1, Math.floor((event.offsetX / bars.clientWidth) * choice.steps.length)),
    );
  bars.addEventListener("click", (event) => choose(placeOf(event)));
  bars.addEventListener("mousemove", (event) => {
    const [name, a, b] = choice.steps[placeOf(event)];
    show(event, "step " + name + ": " + ticks(b - a));
  });
  bars.addEventListener("mouseleave", (event) => show(event, ""));
  range.addEventListener("input", () => choose(Number(range.value)));
  function update() {
    const chosen = choice.place === null ? null : choice.steps[choice.place];
    text.textContent = chosen
      ? "step " + chosen[0] + ", " + ticks(chosen[2] - chosen[1])
      : "all " + choice.steps.length + " steps";
    if (chosen) range.value = choice.place;
    paint();
  }
  choice.listeners.push(update);
  update();
  return [make("div", { class: "steps" }, range, text, all), bars];
}
