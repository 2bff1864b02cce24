// ------------------------------------------------------------------------------------------ time
function timelines(report) {
  const groups = report.time.groups,
    choice = steps(report);
  const ranks = groups.reduce((sum, group) => sum + group.ranks.length, 0);
  const open = new Set(
    ranks <= FOLDED ? groups.flatMap((group) => group.ranks.map((rank) => group.group + " " + rank.rank)) : [],
  );
  const LEFT = Math.min(190, Math.max(96, innerWidth * 0.22)),
    HEAD = 26;
  let lanes = lanesOf(report, open),
    from = 0,
    to = 1,
    marked = true,
    pinned = null;
  const length = (group) => {
    const step = stepOf(report, group);
    return step
      ? step[2] - step[1]
      : highest(
          group.steps.map(([, , end]) => end),
          1,
        );
  };
  const offset = (group) => stepOf(report, group)?.[1] || 0;
  const end = () => highest(groups.map(length), 1);
  const total = () => lanes.length * (ROW + GAP) + 8;
  const tall = () => Math.min(total() + HEAD, Math.max(220, Math.round(innerHeight * 0.66)));
  const spacer = make("div"),
    scroll = make("div", { class: "lanes", tabindex: "0", "aria-label": "timelines; + and - zoom, arrows move" });
  const top = () => scroll.scrollTop;

  const [canvas, paint] = drawing(
    tall,
    (context, width, height) => {
      const found = colors("compute", "exposed", "hidden", "host", "wait", "text", "dim", "line", "back", "mark");
      const first = Math.max(0, Math.floor(top() / (ROW + GAP))),
        last = Math.min(lanes.length, first + Math.ceil(height / (ROW + GAP)) + 1);
      const row = (place) => HEAD + place * (ROW + GAP) - top();
      context.strokeStyle = found.line;
      context.fillStyle = found.dim;
      context.lineWidth = 1;
      const [times, every] = marks(from, to, Math.max(2, (width - LEFT) / 110)),
        x = (t) => LEFT + ((t - from) / (to - from)) * (width - LEFT);
      for (const t of times) {
        context.beginPath();
        context.moveTo(x(t), HEAD - 6);
        context.lineTo(x(t), height);
        context.stroke();
      }
      for (let place = first; place < last; place++) {
        const lane = lanes[place],
          view = { from, to, left: LEFT, width, offset: offset(lane.group) };
        paintLane(context, lane, row(place), view, found, report);
      }
      if (marked) paintPath(context, found, x, row, first, last, width);
      context.fillStyle = found.back;
      context.fillRect(0, 0, LEFT - 2, height);
      context.fillRect(0, 0, width, HEAD - 4);
      for (let place = first; place < last; place++) {
        const lane = lanes[place],
          y = row(place);
        if (y < HEAD - ROW) continue;
        context.fillStyle = lane.head ? found.text : found.dim;
        const sign = lane.head ? (lane.place < 0 ? "▸ " : "▾ ") : "   ";
        context.fillText(fit(context, sign + lane.name, LEFT - 12), 4, y + 13);
      }
      context.fillStyle = found.back;
      context.fillRect(0, 0, width, HEAD - 4);
      context.fillStyle = found.dim;
      const text = tickAxis(every, to);
      markTexts(
        context,
        times.map((t) => [x(t), text(t)]),
        14,
        LEFT,
        width,
      );
    },
    "timelines of all ranks and queues",
  );

  function paintPath(context, found, x, row, first, last, width) {
    // Outlines of the acts of the critical path, and lines where it goes from one lane to another.
    const predicted = groups.find((group) => group.path.length);
    if (!predicted) return;
    const places = new Map();
    lanes.forEach((lane, place) => {
      if (lane.group === predicted) places.set(lane.rank.rank + " " + lane.queue, place);
    });
    const shift = offset(predicted);
    context.strokeStyle = found.text;
    context.lineWidth = 1.5;
    let before = null;
    for (const [rank, queue, begin, took] of predicted.path) {
      const place = places.get(rank + " " + queue) ?? places.get(rank + " "),
        a = x(begin - shift),
        b = x(begin + took - shift);
      if (place === undefined) {
        before = null;
        continue;
      }
      if (b >= LEFT && a <= width) {
        const y = row(place),
          box = [Math.max(a, LEFT), Math.min(b, width)];
        if (before && before[1] !== place && Math.abs(before[0] - a) < width) {
          context.globalAlpha = 0.5;
          context.beginPath();
          context.moveTo(before[0], row(before[1]) + ROW / 2);
          context.lineTo(a, y + ROW / 2);
          context.stroke();
          context.globalAlpha = 1;
        }
        if (place >= first && place < last) {
          if (box[1] - box[0] > 3) context.strokeRect(box[0] + 0.75, y + 0.75, box[1] - box[0] - 1.5, ROW - 1.5);
          else {
            context.fillStyle = found.text;
            context.fillRect(box[0], y + ROW - 2, Math.max(1, box[1] - box[0]), 2);
          }
        }
      }
      before = [b, place];
    }
  }

  function at(event) {
    const width = canvas.clientWidth,
      place = Math.floor((event.offsetY - HEAD + top()) / (ROW + GAP));
    return {
      time: from + ((event.offsetX - LEFT) / (width - LEFT)) * (to - from),
      lane: event.offsetY > HEAD - 4 ? lanes[place] : undefined,
      inside: event.offsetX > LEFT,
      slack: (to - from) / (width - LEFT),
    };
  }
  function under(event) {
    const { time, lane, inside, slack } = at(event);
    if (!lane || !inside) return null;
    const n = sliceUnder(lane, time + offset(lane.group), slack, report);
    return n < 0 ? null : { lane, n };
  }
  function zoom(by, about) {
    const width = Math.max(2, Math.min(end(), (to - from) * by));
    from = Math.max(0, Math.min(end() - width, about - ((about - from) * width) / (to - from)));
    to = from + width;
    paint();
  }
  function move(by) {
    const width = to - from;
    from = Math.max(0, Math.min(end() - width, from + by));
    to = from + width;
    paint();
  }
  const pin = make("p", { class: "pin", role: "status", text: "A click on an act keeps what is said of it here." });
  canvas.addEventListener("mousemove", (event) => {
    const found = held ? null : under(event);
    show(event, found ? found.lane.name + ": " + sliceText(report, found.lane, found.n) : "");
  });
  canvas.addEventListener("mouseleave", (event) => show(event, ""));
  // The wheel zooms; with Shift, or over the names, it scrolls as anywhere.
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (event.shiftKey || event.offsetX < LEFT) return;
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) move((event.deltaX / canvas.clientWidth) * (to - from));
      else zoom(Math.exp(Math.max(-200, Math.min(200, event.deltaY)) / 400), at(event).time);
    },
    { passive: false },
  );
  let held = null,
    moved = false;
  canvas.addEventListener("pointerdown", (event) => {
    held = event.clientX;
    moved = false;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (held === null || (!moved && Math.abs(event.clientX - held) < 3)) return;
    moved = true;
    move(((held - event.clientX) / (canvas.clientWidth - LEFT)) * (to - from));
    held = event.clientX;
  });
  canvas.addEventListener("pointercancel", () => {
    held = null;
  });
  canvas.addEventListener("pointerup", (event) => {
    held = null;
    if (moved) return;
    const { lane, inside } = at(event),
      found = under(event);
    if (lane && !inside) {
      if (open.has(lane.key)) open.delete(lane.key);
      else open.add(lane.key);
      arrange();
    } else if (found) {
      pinned = found;
      pin.textContent =
        found.lane.group.group +
        " rank " +
        found.lane.rank.rank +
        " " +
        found.lane.rank.queues[found.lane.rank.queue[found.n]] +
        ": " +
        sliceText(report, found.lane, found.n);
    }
  });
  scroll.addEventListener("scroll", paint);
  scroll.addEventListener("keydown", (event) => {
    const middle = (from + to) / 2,
      part = (to - from) / 8;
    const acts = {
      "+": () => zoom(0.7, middle),
      "=": () => zoom(0.7, middle),
      "-": () => zoom(1 / 0.7, middle),
      ArrowLeft: () => move(-part),
      ArrowRight: () => move(part),
      0: () => whole(),
    };
    if (acts[event.key]) {
      event.preventDefault();
      acts[event.key]();
    }
  });
  function whole() {
    from = 0;
    to = end();
    paint();
  }
  function arrange() {
    // The lanes have changed.
    lanes = lanesOf(report, open);
    spacer.style.height = total() + HEAD + "px";
    scroll.style.maxHeight = tall() + "px";
    paint();
  }
  const plain = (text, act, name) =>
    make("button", { class: "plain", text, onclick: act, ...(name ? { "aria-label": name, title: name } : {}) });
  const totals = make("div");
  function update() {
    from = 0;
    to = end();
    totals.replaceChildren(...causes(report));
    paint();
  }
  choice.listeners.push(update);
  spacer.append(canvas);
  scroll.append(spacer);
  arrange();
  update();
  const all = () => {
    const keys = groups.flatMap((group) => group.ranks.map((rank) => group.group + " " + rank.rank));
    if (open.size === keys.length) open.clear();
    else keys.forEach((key) => open.add(key));
    arrange();
  };
  const hasPath = groups.some((group) => group.path.length);
  const check = make("input", {
    type: "checkbox",
    checked: "",
    onchange: () => {
      marked = check.checked;
      paint();
    },
  });
  return [
    ...stepSlider(report),
    legend(
      ["compute", "computing"],
      ["exposed", "exposed communication"],
      ["hidden", "hidden communication"],
      ["host", "host"],
      ["wait", "waits"],
      ...(hasPath ? [make("label", {}, check, " critical path, outlined")] : []),
    ),
    make(
      "div",
      { class: "tools" },
      plain("whole step", whole),
      plain("+", () => zoom(0.6, (from + to) / 2), "closer"),
      plain("−", () => zoom(1 / 0.6, (from + to) / 2), "wider"),
      plain("queues of all ranks", all),
      make("span", {
        class: "dim",
        text: "wheel: closer; drag: along; Shift and wheel: down; a click on a rank's name opens its queues",
      }),
    ),
    scroll,
    pin,
    totals,
    ...(hasPath && report.summary.path
      ? [
          fold(
            "Critical path, act by act",
            pathTable(report, (act) => {
              const group = groups.find((each) => each.path.length),
                first = report.summary.path[0],
                begin = act.start * 1e7 - first.start * 1e7 + group.path[0][2] - offset(group),
                width = Math.max(20, (act.end - act.start) * 1e7 * 4);
              from = Math.max(0, begin - width / 4);
              to = from + width;
              paint();
            }),
          ),
        ]
      : []),
  ];
}
function sharesOf(shares) {
  // The step as a bar: what ranks do in it, and what they do not.
  const parts = [
    ["compute", "computing", shares.compute],
    ["exposed", "exposed communication", shares.exposed],
    ["wait", "idle", shares.idle],
  ];
  const said = parts.map(([, name, part]) => name + " " + percent(part / (shares.step || 1))).join(", ");
  return [
    bar(
      parts,
      parts.reduce((sum, [, , part]) => sum + part, 0),
    ),
    make("p", { text: said + "; beside computing, hidden communication of " + seconds(shares.hidden) }),
  ];
}
function causes(report) {
  // Seconds of the chosen step by cause.
  return report.time.groups.flatMap((group) => {
    const step = stepOf(report, group),
      name = step ? step[0] : group.steps.length ? group.steps[group.steps.length - 1][0] : null;
    const rows = group.totals[name];
    if (!rows)
      return group.steps.length
        ? [
            make("p", {
              class: "dim",
              text:
                "Totals by cause are kept of the longest and of the last steps, " +
                Object.keys(group.totals).length +
                " of " +
                group.steps.length +
                "; step " +
                name +
                " is none of them.",
            }),
          ]
        : [];
    const shares = group.shares?.[name];
    return [
      make("h2", {
        text:
          "Totals by cause, " +
          group.group +
          ", step " +
          name +
          ", the mean of " +
          group.ranks.length +
          (group.ranks.length === 1 ? " rank" : " ranks"),
      }),
      ...(shares ? sharesOf(shares) : []),
      make("p", {
        class: "dim",
        text: "Queues act at the same time, so rows do not add up to the step; what a communication waited for counts as wait, too.",
      }),
      table(rows, [
        [
          "",
          (x) => x[0],
          (x) =>
            make("i", { class: "dot", style: "background:var(--" + (x === "communication" ? "exposed" : x) + ")" }),
        ],
        ["kind", (x) => x[0]],
        ["cause", (x) => x[1]],
        ["seconds", (x) => x[2], seconds, true],
        ["exposed", (x) => (x[0] === "communication" ? x[3] : null), seconds, true],
        ["times, on all ranks", (x) => x[4], number, true],
      ]),
    ];
  });
}
