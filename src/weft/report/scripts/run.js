// ------------------------------------------------------------------------------------------ run
function figures(report) {
  return Object.entries(report.figures).flatMap(([name, [at, values]]) => {
    const points = at.map((step, place) => [step, values[place]]),
      last = [...points].reverse().find(([, y]) => y != null);
    return [
      make("h2", { text: name + (last ? ": " + number(last[1]) + " after step " + last[0] : "") }),
      chart([[name, "mark", points]], {
        x: (x) => "step " + x,
        xAxis: () => (x) => "step " + x,
        apart: 1,
        y: number,
        yAxis: numberAxis,
        height: 180,
        name: name + " over steps",
      }),
    ];
  });
}
