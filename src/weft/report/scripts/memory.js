// ------------------------------------------------------------------------------------------ memory
// A color for each kind, the same in all pictures.
const KINDS = [
  "parameters",
  "buffers",
  "states",
  "batch",
  "constants",
  "gradients",
  "activations",
  "communication",
  "all kinds",
];
const kindColor = (kind) => "kind-" + Math.max(0, KINDS.indexOf(kind));
function firstAt(array, value, low = 0, high = array.length) {
  // The first place whose value is at least this.
  while (low < high) {
    const middle = (low + high) >> 1;
    if (array[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}
function memory(report) {
  const held = report.summary.memory,
    holder = make("div");
  const keys = [...new Map(report.memory.map((row) => [row.group + " " + row.rank, row])).entries()];
  const fullest = (group) =>
    report.memory.filter((row) => row.group === group).reduce((a, b) => (b.peak.bytes > a.peak.bytes ? b : a));
  const groups = [...new Set(report.memory.map((row) => row.group))];
  const select = make(
    "select",
    { "aria-label": "rank" },
    make("option", { value: "", text: "the fullest" }),
    ...keys.map(([key, row]) => make("option", { value: key, text: row.group + " rank " + row.rank })),
  );
  const fullestKeys = groups.map((group) => {
      const row = fullest(group);
      return row.group + " " + row.rank;
    }),
    chosen = new Set(fullestKeys);
  function update() {
    const few = keys.length <= 4,
      wanted = few ? keys.map(([key]) => key) : [...chosen];
    holder.replaceChildren(
      ...wanted.flatMap((key, place) => {
        const own = report.memory.filter((row) => row.group + " " + row.rank === key),
          { steps: all, place: chosenStep } = steps(report);
        const row =
          (chosenStep === null ? null : own.find((each) => each.step === all[chosenStep][0])) || own[own.length - 1];
        return row
          ? [
              make("h2", {
                text:
                  row.group + " rank " + row.rank + ", step " + row.step + ": " + bytes(row.peak.bytes) + " at most",
              }),
              ...memoryOf(row, !place),
            ]
          : [];
      }),
    );
  }
  select.addEventListener("change", () => {
    chosen.clear();
    (select.value ? [select.value] : fullestKeys).forEach((key) => chosen.add(key));
    update();
  });
  steps(report).listeners.push(update);
  update();
  return [
    ...(held
      ? [
          make("p", {
            text:
              "As planned, the fullest rank is " +
              held.rank +
              ": " +
              bytes(held.planned) +
              " of tensors and " +
              bytes(held.reserve) +
              " that its device takes beyond" +
              (held.capacity ? ", of " + bytes(held.capacity) : "") +
              ".",
          }),
        ]
      : []),
    ...stepSlider(report),
    ...(keys.length > 4 ? [make("p", {}, "Shown: ", select)] : []),
    legend(
      ...KINDS.filter((kind) => report.memory.some((row) => row.kinds.includes(kind))).map((kind) => [
        kindColor(kind),
        kind,
      ]),
    ),
    holder,
  ];
}
function memoryOf(row, first) {
  // Bytes by kind, one above the other, and what is alive at the peak.
  const sums = row.times.map((_, n) => row.levels.reduce((sum, own) => sum + own[n], 0));
  const most = highest(sums, Math.max(1, row.peak.bytes)),
    end = Math.max(1, row.times[row.times.length - 1] || 1);
  const LEFT = 76,
    HIGH = 200,
    x = (t, width) => LEFT + (t / end) * (width - LEFT - 8),
    y = (size) => HIGH - 20 - (size / most) * (HIGH - 44);
  const [canvas] = drawing(
    HIGH,
    (context, width) => {
      const found = colors("line", "dim", "text");
      context.strokeStyle = found.line;
      context.fillStyle = found.dim;
      const unit = 1024 ** Math.floor(Math.log(most) / Math.log(1024));
      for (const size of marks(0, most / unit, 4)[0].map((part) => part * unit)) {
        context.beginPath();
        context.moveTo(LEFT, y(size));
        context.lineTo(width, y(size));
        context.stroke();
        context.fillText(fit(context, bytes(size), LEFT - 8), 4, y(size) + 4);
      }
      const [times, apart] = marks(0, end, Math.max(2, width / 140)),
        text = tickAxis(apart, end);
      markTexts(
        context,
        times.map((time) => [x(time, width), text(time)]),
        HIGH - 4,
        LEFT,
        width,
      );
      const below = row.times.map(() => 0);
      row.kinds.forEach((kind, place) => {
        const own = row.levels[place];
        context.fillStyle = color(kindColor(kind));
        context.beginPath();
        row.times.forEach((time, n) => {
          context.lineTo(x(time, width), y(below[n] + own[n]));
          if (n + 1 < row.times.length) context.lineTo(x(row.times[n + 1], width), y(below[n] + own[n]));
        });
        for (let n = row.times.length - 1; n >= 0; n--) {
          if (n + 1 < row.times.length) context.lineTo(x(row.times[n + 1], width), y(below[n]));
          context.lineTo(x(row.times[n], width), y(below[n]));
        }
        context.fill();
        own.forEach((size, n) => {
          below[n] += size;
        });
      });
      const at = x(row.peak.at, width),
        told = "peak: " + bytes(row.peak.bytes) + " at " + ticks(row.peak.at),
        wide = context.measureText(told).width;
      context.strokeStyle = found.text;
      context.beginPath();
      context.moveTo(at, 18);
      context.lineTo(at, HIGH - 20);
      context.stroke();
      context.fillStyle = found.text;
      context.fillText(told, Math.max(LEFT, Math.min(at + 4, width - wide - 4)), 13);
    },
    "memory of " + row.group + " rank " + row.rank + " over a step",
  );
  canvas.addEventListener("mousemove", (event) => {
    const time = ((event.offsetX - LEFT) / (canvas.clientWidth - LEFT - 8)) * end,
      n = Math.max(0, firstAt(row.times, time + 1e-9) - 1);
    show(
      event,
      time < 0
        ? ""
        : bytes(sums[n]) +
            " at " +
            ticks(row.times[n]) +
            ": " +
            row.kinds.map((kind, place) => kind + " " + bytes(row.levels[place][n])).join(", "),
    );
  });
  canvas.addEventListener("mouseleave", (event) => show(event, ""));
  const named = row.peak.held.length
    ? [
        fold(
          "Alive at the peak, beside variables and batch",
          table(row.peak.held, [
            ["value", (x) => x[0]],
            ["local shape", (x) => x[1]],
            ["versions", (x) => x[2], null, true],
            ["bytes", (x) => x[3], bytes, true],
            ["made at", (x) => x[4]],
          ]),
        ),
      ]
    : [];
  if (named.length) named[0].open = first;
  return [canvas, ...named];
}
