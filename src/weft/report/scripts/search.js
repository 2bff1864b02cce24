// ------------------------------------------------------------------------------------------ search
function search(report) {
  const given = report.search,
    marked = (x) => x.outcome === "best";
  const tried = given.tried.map((each, order) => ({ ...each, order }));
  const blank = (text) => (x) => (x == null ? "" : text(x));
  return [
    make("p", {
      text:
        "The best takes " +
        seconds(given.seconds) +
        " a step; no strategy of the space takes less than " +
        seconds(given.bound) +
        ", " +
        percent(given.gap) +
        " below.",
    }),
    ...(given.locality ? [make("p", { class: "dim", text: "Moves: " + given.locality + "." })] : []),
    ...course(given),
    make("h2", { text: "Why not" }),
    table(given.why, [
      ["kind", (x) => x.kind],
      ["strategy", (x) => x.name],
      ["step", (x) => x.seconds, seconds, true],
      ["memory", (x) => x.memory, bytes, true],
      ["known", (x) => x.known],
      ["loses by", (x) => x.why],
    ]),
    make("h2", { text: "Tried" }),
    table(
      tried,
      [
        ["", (x) => x.order, (x) => x + 1, true],
        ["strategy", (x) => x.name],
        ["step", (x) => x.seconds, blank(seconds), true],
        ["memory", (x) => x.memory, blank(bytes), true],
        ["by hand", (x) => x.by_hand, (x) => (x ? "yes" : "")],
        ["outcome", (x) => x.outcome],
        ["why", (x) => x.why],
      ],
      { marked },
    ),
    make("h2", { text: "Not planned, not searched" }),
    make(
      "ul",
      {},
      ...Object.entries(given.skipped)
        .filter(([, count]) => count)
        .map(([why, count]) => make("li", { text: count + ": " + why })),
      ...given.not_searched.map((each) => make("li", { text: "not searched: " + each })),
    ),
    make("h2", { text: "The best strategy, as a file" }),
    make("pre", { text: given.best }),
  ];
}
function course(given) {
  // What was looked at over time, chain by chain; the best so far; the bound and the gap.
  if (!given.course.length) return [];
  const shades = ["kind-0", "kind-5", "kind-3", "kind-2", "kind-6", "kind-7", "kind-1", "kind-4"];
  const rows = given.chains.map((name, place) => {
    const own = given.course.filter(([, chain]) => chain === place),
      fit = own.filter(([, , x]) => x != null);
    return {
      name,
      place,
      own,
      begin: own[0][0],
      end: own[own.length - 1][0],
      least: fit.length ? Math.min(...fit.map(([, , x]) => x)) : null,
      fit: fit.length,
    };
  });
  // Steps far longer than the best would hide how those near to it go.
  const most = 4 * given.seconds,
    near = (x) => (x == null || x > most ? null : x);
  const lines = [
    ...rows.map((row) => [row.name, shades[row.place % shades.length], row.own.map(([t, , x]) => [t, near(x)]), true]),
    ["best so far", "text", given.course.map(([t, , , best]) => [t, near(best)])],
    ["bound", "hidden", given.course.map(([t, , , , bound]) => [t, bound])],
  ];
  const left = given.course.filter(([, , x]) => x != null && x > most).length;
  return [
    make("h2", { text: "Seconds of a step, over the time of the search" }),
    legend(
      ["text", "best so far"],
      ["hidden", "bound"],
      make("span", {
        text:
          "points: what was looked at, a color for each chain" +
          (left ? "; " + left + " above " + seconds(most) + " are left out" : ""),
      }),
    ),
    chart(lines, {
      x: (t) => t.toFixed(1) + " s",
      xAxis: timeAxis,
      y: seconds,
      yAxis: timeAxis,
      least: 0,
      height: 260,
      steps: true,
      name: "seconds of a step over the time of the search",
    }),
    fold(
      "Chains",
      table(rows, [
        [
          "",
          (x) => x.place,
          (x) => make("i", { class: "dot", style: "background:var(--" + shades[x % shades.length] + ")" }),
        ],
        ["chain", (x) => x.name],
        ["begins after", (x) => x.begin, (x) => x.toFixed(2) + " s", true],
        ["ends after", (x) => x.end, (x) => x.toFixed(2) + " s", true],
        ["looked at", (x) => x.own.length, null, true],
        ["fit", (x) => x.fit, null, true],
        ["its best", (x) => x.least, (x) => (x == null ? "none" : seconds(x)), true],
      ]),
    ),
  ];
}
