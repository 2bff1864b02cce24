// ------------------------------------------------------------------------------------------ compare
function comparison() {
  // What can be said in a number of each report, side by side; and parameters that lie otherwise.
  const mean = (values) => (values.length ? values.reduce((sum, x) => sum + x, 0) / values.length : null);
  const ofRanks = (name) => (report) => {
    const ranks = report.summary.ranks || [],
      count = ranks.reduce((sum, x) => sum + x.count, 0);
    return count ? ranks.reduce((sum, x) => sum + x.count * x[name], 0) / count : null;
  };
  const peak = (group) => (report) => {
    const own = report.memory.filter((row) => row.group === group);
    return own.length ? highest(own.map((row) => row.peak.bytes)) : null;
  };
  const measured = (report) =>
    mean(
      (report.time.find((group) => group.group === "measured")?.steps || []).map(([, a, b]) => (b - a) / 1e7),
    );
  const sent = (report) => (report.sent.cells ? report.sent.cells.reduce((sum, [, , , size]) => sum + size, 0) : null);
  const last = (name) => (report) => (report.figures[name]?.[1] || []).filter((x) => x != null).pop() ?? null;
  const names = [...new Set(reports.flatMap((report) => Object.keys(report.figures)))];
  const rows = [
    ["a step, predicted", (report) => report.summary.step_seconds ?? null, seconds],
    ["a step, measured, mean of steps", measured, seconds],
    ["computing, predicted, mean of ranks", ofRanks("compute"), seconds],
    ["exposed communication", ofRanks("exposed"), seconds],
    ["hidden communication", ofRanks("hidden"), seconds],
    ["idle", ofRanks("idle"), seconds],
    ["memory at the peak, fullest rank, predicted", peak("predicted"), bytes],
    ["memory at the peak, fullest rank, in the order measured", peak("measured"), bytes],
    ["bytes sent in a step, all ranks", sent, bytes],
    ...names.map((name) => [name + ", last", last(name), number]),
  ]
    .map(([name, of, text]) => [name, reports.map(of), text])
    .filter(([, values]) => values.some((x) => x !== null));
  const heads = reports.map((report, place) => [
    report.title,
    (row) => row[1][place],
    (x, row) => (x === null ? "" : row[2](x)),
    true,
  ]);
  const against =
    reports.length === 2
      ? [
          [
            "second against first",
            ([, [a, b]]) => (a && b !== null ? b / a - 1 : null),
            (x) => (x === null ? "" : (x > 0 ? "+" : x < 0 ? "−" : "") + percent(Math.abs(x))),
            true,
          ],
        ]
      : [];
  return [
    make("h2", { text: "Side by side" }),
    table(rows, [["", (row) => row[0]], ...heads, ...against]),
    ...otherLayouts(),
  ];
}
function otherLayouts() {
  const laid = new Map();
  reports.forEach((report, place) =>
    (report.model.rows || []).forEach((row) => {
      if (!row.layout?.length) return;
      if (!laid.has(row.path))
        laid.set(
          row.path,
          reports.map(() => null),
        );
      laid.get(row.path)[place] = row;
    }),
  );
  const text = (row) => (row ? row.layout.join(", ") + " on " + row.grid.join("×") : null);
  const rows = [...laid].filter(
    ([, own]) => own.filter(Boolean).length > 1 && new Set(own.filter(Boolean).map(text)).size > 1,
  );
  if (!rows.length) return [];
  return [
    fold(
      "Parameters that lie otherwise: " + rows.length,
      table(rows, [
        ["parameter", (x) => x[0]],
        ...reports.map((report, place) => [
          report.title,
          (x) => text(x[1][place]),
          (x, row) =>
            row[1][place]
              ? make(
                  "span",
                  {},
                  sbpGrid(row[1][place]),
                  make("span", { class: "dim", text: " of " + row[1][place].grid.join("×") }),
                )
              : "",
        ]),
      ]),
    ),
  ];
}
