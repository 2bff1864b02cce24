// ------------------------------------------------------------------------------------------ time
function timelines(report) {
  const totals = make("div"),
    update = () => totals.replaceChildren(...causes(report));
  steps(report).listeners.push(update);
  update();
  return [...stepSlider(report), forPerfetto(report.trace), totals];
}
function forPerfetto(trace) {
  // Every act of every queue, for a viewer that draws them.
  const viewer = "ui.perfetto.dev or chrome://tracing";
  if (!trace.traceEvents)
    return make("p", {
      class: "dim",
      text:
        "For every act of every queue, write the timeline by program.trace or weft simulate --trace, and open it in " +
        viewer +
        ".",
    });
  const save = () => {
    const href = URL.createObjectURL(new Blob([JSON.stringify(trace)], { type: "application/json" }));
    make("a", { href, download: "timeline.json" }).click();
    setTimeout(() => URL.revokeObjectURL(href), 10_000);
  };
  return make(
    "div",
    { class: "tools" },
    make("button", { class: "plain", text: "save the timeline", onclick: save }),
    make("span", { class: "dim", text: "every act of every queue, as a file for " + viewer }),
  );
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
  return report.time.flatMap((group) => {
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
          group.ranks +
          (group.ranks === 1 ? " rank" : " ranks"),
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
