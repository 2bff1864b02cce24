// ------------------------------------------------------------------------------------------ bytes
function matrix(report) {
  const { ranks, apart, groups, kinds, cells, largest } = report.sent,
    count = Math.ceil(ranks.length / apart);
  const chosen = new Set(groups.map((_, place) => place)),
    side = make("div", { class: "dim", text: "Choose a cell." });
  const names = (place) => {
    const first = ranks[place * apart],
      last = ranks[Math.min(ranks.length, (place + 1) * apart) - 1];
    return first === last ? "" + first : first + " to " + last;
  };
  let sums,
    most,
    picked = null;
  function add() {
    sums = new Float64Array(count * count);
    most = 0;
    for (const [row, column, group, size] of cells)
      if (chosen.has(group)) most = Math.max(most, (sums[row * count + column] += size));
  }
  const LEFT = 84,
    each = () => Math.max(5, Math.min(34, ((canvas?.clientWidth || 640) - LEFT) / count));
  let canvas = null;
  const height = () => 30 + count * each() + 6;
  const [made, paint] = drawing(
    height,
    (context) => {
      const found = colors("line", "dim", "text", "exposed", "soft", "mark"),
        size = each();
      context.fillStyle = found.dim;
      const every = Math.max(1, Math.ceil(26 / size));
      for (let n = 0; n < count; n += every) {
        context.fillText(fit(context, "" + ranks[n * apart], size * every - 2), LEFT + n * size + 2, 24);
        if (size * every >= 12) context.fillText("" + ranks[n * apart], 44, 30 + n * size + Math.min(size, 14) - 2);
      }
      context.fillText("from ↓ to →", 4, 24);
      for (let row = 0; row < count; row++)
        for (let column = 0; column < count; column++) {
          const here = sums[row * count + column];
          context.globalAlpha = 1;
          context.fillStyle = found.soft;
          context.fillRect(LEFT + column * size, 30 + row * size, size - 1, size - 1);
          if (here) {
            context.globalAlpha = 0.15 + (0.85 * here) / most;
            context.fillStyle = found.exposed;
            context.fillRect(LEFT + column * size, 30 + row * size, size - 1, size - 1);
          }
        }
      context.globalAlpha = 1;
      if (picked) {
        context.strokeStyle = found.text;
        context.lineWidth = 2;
        context.strokeRect(LEFT + picked[1] * size, 30 + picked[0] * size, size - 1, size - 1);
      }
    },
    "bytes that ranks send to one another",
  );
  canvas = made;
  const cell = (event) => {
    const size = each(),
      row = Math.floor((event.offsetY - 30) / size),
      column = Math.floor((event.offsetX - LEFT) / size);
    return row >= 0 && column >= 0 && row < count && column < count ? [row, column] : null;
  };
  canvas.addEventListener("mousemove", (event) => {
    const at = cell(event);
    show(event, at ? "from " + names(at[0]) + " to " + names(at[1]) + ": " + bytes(sums[at[0] * count + at[1]]) : "");
  });
  canvas.addEventListener("mouseleave", (event) => show(event, ""));
  canvas.addEventListener("click", (event) => {
    picked = cell(event);
    tell();
    paint();
  });
  function tell() {
    if (!picked) return;
    const rows = cells
      .filter(([row, column]) => row === picked[0] && column === picked[1])
      .map(([, , group, size]) => [groups[group], kinds[group].join(", "), size])
      .sort((a, b) => b[2] - a[2]);
    side.className = "";
    side.replaceChildren(
      make("h2", { text: "rank " + names(picked[0]) + " sends rank " + names(picked[1]) + " in a step" }),
      rows.length
        ? table(rows, [
            ["for", (x) => x[0]],
            ["by", (x) => x[1]],
            ["bytes", (x) => x[2], bytes, true],
          ])
        : make("p", { class: "dim", text: "nothing" }),
    );
  }
  const total = (place) => cells.filter(([, , group]) => group === place).reduce((sum, [, , , size]) => sum + size, 0);
  const boxes = groups.map((name, place) => {
    const box = make("input", {
      type: "checkbox",
      checked: "",
      onchange: () => {
        if (box.checked) chosen.add(place);
        else chosen.delete(place);
        add();
        paint();
      },
    });
    return make("label", {}, box, " " + name + ", " + bytes(total(place)));
  });
  add();
  const sent = ranks
    .map((_, n) => n)
    .slice(0, count)
    .map((row) => {
      let out = 0,
        into = 0;
      for (const [from, to, , size] of cells) {
        if (from === row) out += size;
        if (to === row) into += size;
      }
      return [row, out, into];
    });
  return [
    make("p", {
      class: "dim",
      text:
        "Bytes of a step, as planned" +
        (apart > 1 ? "; a cell stands for " + apart + " by " + apart + " ranks" : "") +
        ". Those of a collective are spread evenly over the pairs of its ranks; those of transfers are exact.",
    }),
    make("div", { class: "legend" }, ...boxes),
    make("div", { class: "tree" }, make("div", {}, canvas), side),
    make("h2", { text: "Exchanges that send most" }),
    table(largest, [
      ["for", (x) => x[0]],
      ["what", (x) => x[1]],
      ["times", (x) => x[3], number, true],
      ["bytes, of all ranks", (x) => x[2], bytes, true],
    ]),
    fold(
      "Sent and received, rank by rank",
      table(sent, [
        ["rank", (x) => x[0], names, true],
        ["sends", (x) => x[1], bytes, true],
        ["receives", (x) => x[2], bytes, true],
      ]),
    ),
  ];
}
