
// ------------------------------------------------------------------------------------------ run
function figures(report) {
  return Object.entries(report.figures).flatMap(([name, [at, values]]) => {
    const points = at.map((step, place) => [step, values[place]]), last = [...points].reverse().find(([, y]) => y != null);
    return [
      make("h2", { text: name + (last ? ": " + number(last[1]) + " after step " + last[0] : "") }),
      chart([[name, "mark", points]], { x: (x) => "step " + Math.round(x), y: number, height: 180, name: name + " over steps" }),
    ];
  });
}
