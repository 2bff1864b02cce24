// ------------------------------------------------------------------------------------------ summary
function bar(parts, whole) {
  // Parts of a whole, each with its color and name.
  return make(
    "div",
    {
      class: "bar",
      role: "img",
      "aria-label": parts.map(([, name, part]) => name + " " + percent(part / (whole || 1))).join(", "),
    },
    ...parts.map(([shade, name, part]) =>
      make("i", {
        title: name + " " + seconds(part),
        style: "width:" + (100 * part) / (whole || 1) + "%;background:var(--" + shade + ")",
      }),
    ),
  );
}
function summary(report) {
  const found = [];
  if (report.notes.length) found.push(make("pre", { text: report.notes.join("\n") }));
  const given = report.summary;
  if (!given.text) return found;
  found.push(make("h2", { text: "As simulated" }), make("pre", { text: given.text.join("\n") }));
  found.push(
    make("h2", { text: "Where the time of a step goes" }),
    legend(["compute", "computing"], ["exposed", "exposed communication"], ["wait", "idle"]),
  );
  found.push(
    table(given.ranks, [
      ["rank", (x) => x.rank, null, true],
      ["stands for", (x) => x.count, (x) => x + (x === 1 ? " rank" : " ranks"), true],
      ["step", (x) => x.step, seconds, true],
      [
        "",
        () => 0,
        (_, x) =>
          bar(
            [
              ["compute", "computing", x.compute],
              ["exposed", "exposed communication", x.exposed],
              ["wait", "idle", x.idle],
            ],
            x.step,
          ),
      ],
      ["computing", (x) => x.compute, seconds, true],
      ["communication", (x) => x.communication, seconds, true],
      ["hidden", (x) => x.hidden, seconds, true],
      ["exposed", (x) => x.exposed, seconds, true],
      ["idle", (x) => x.idle, seconds, true],
      ["bubble", (x) => x.bubble, percent, true],
    ]),
  );
  found.push(
    make("h2", { text: "Largest costs" }),
    table(given.costs, [
      ["what", (x) => x.what],
      ["where", (x) => x.where],
      ["times", (x) => x.times, null, true],
      ["seconds", (x) => x.seconds, seconds, true],
      ["of the step", (x) => x.seconds / (given.step_seconds || 1), percent, true],
      ["", (x) => x.estimated, (x) => (x ? "estimated" : "")],
    ]),
  );
  found.push(make("h2", { text: "Critical path of a step" }), pathTable(given.path));
  return found;
}
function pathTable(path) {
  const begin = path.length ? path[0].start : 0;
  return table(path, [
    ["begin", (x) => x.start - begin, seconds, true],
    ["takes", (x) => x.end - x.start, seconds, true],
    ["rank", (x) => x.rank, null, true],
    ["queue", (x) => x.queue],
    ["micro-batch", (x) => x.micro, null, true],
    ["act", (x) => x.name],
  ]);
}
