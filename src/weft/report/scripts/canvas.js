// ------------------------------------------------------------------------------------------ canvas
function drawing(height, draw, name) {
  // A canvas that is drawn anew when its size or the colors change. `height` is a number, or a function of none.
  const high = typeof height === "function" ? height : () => height;
  const canvas = make("canvas", { role: "img", "aria-label": name });
  let asked = false;
  function now() {
    asked = false;
    const ratio = devicePixelRatio || 1,
      width = canvas.clientWidth || 800,
      tall = high();
    canvas.style.height = tall + "px";
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(tall * ratio);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "12px system-ui, sans-serif";
    draw(context, width, tall);
  }
  // At most once for each frame of the screen.
  function paint() {
    if (!asked) {
      asked = true;
      requestAnimationFrame(now);
    }
  }
  canvas.style.height = high() + "px";
  new ResizeObserver(paint).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  return [canvas, paint];
}
function niceStep(span, count) {
  // A round number of which about `count` are in a span.
  const raw = Math.max(span, 1e-12) / count,
    power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((x) => x * power).find((x) => x >= raw) || 10 * power;
}
function marks(from, to, count, least = 0) {
  // Round numbers of a span, about so many, and how far they are apart: at least so far.
  const apart = Math.max(niceStep(to - from, count), least),
    found = [];
  for (let n = Math.ceil(from / apart - 1e-9); n * apart <= to + 1e-9 * apart; n++) found.push(n * apart + 0);
  return [found, apart];
}
function markTexts(context, texts, y, left, right) {
  // Texts to the right of their marks, [x, text] each: none is cut off, none over another.
  let free = left;
  for (const [at, text] of texts) {
    const wide = context.measureText(text).width,
      x = Math.min(at + 3, right - wide - 2);
    if (x < free) continue;
    context.fillText(text, x, y);
    free = x + wide + 8;
  }
}
function fit(context, text, width) {
  // A text, cut off where it is too wide.
  if (context.measureText(text).width <= width) return text;
  let end = Math.max(0, Math.floor((text.length * width) / context.measureText(text).width));
  while (end && context.measureText(text.slice(0, end) + "…").width > width) end--;
  return end ? text.slice(0, end) + "…" : "";
}
function chart(lines, options) {
  // Lines over a common axis: [name, color, [[x, y], …]]; y may be null. Options: height, x and y as texts, xAxis and
  // yAxis as those of marks, apart as the least between marks along x, least, steps.
  const points = lines.flatMap(([, , own]) => own.filter(([, y]) => y != null));
  if (!points.length) return make("p", { class: "dim", text: "nothing to draw" });
  let left = Infinity,
    right = -Infinity,
    low = options.least ?? Infinity,
    top = -Infinity;
  for (const [x, y] of points) {
    left = Math.min(left, x);
    right = Math.max(right, x);
    low = Math.min(low, y);
    top = Math.max(top, y);
  }
  if (right === left) right = left + 1;
  const room = (top - low || Math.abs(top) || 1) * 0.06;
  top += room;
  if (options.least == null) low -= room;
  const LEFT = 76,
    height = options.height || 240,
    below = height - 24;
  const place = (x, width) => LEFT + ((x - left) / (right - left)) * (width - LEFT - 12),
    up = (y) => below - ((y - low) / (top - low)) * (below - 10);
  const [canvas] = drawing(
    height,
    (context, width) => {
      const found = colors("line", "dim");
      context.strokeStyle = found.line;
      context.fillStyle = found.dim;
      context.lineWidth = 1;
      const [sides, apart] = marks(low, top, 5),
        side = options.yAxis(apart, Math.max(Math.abs(low), Math.abs(top)));
      for (const y of sides) {
        context.beginPath();
        context.moveTo(LEFT, up(y));
        context.lineTo(width, up(y));
        context.stroke();
        context.fillText(fit(context, side(y), LEFT - 8), 4, up(y) + 4);
      }
      const [along, between] = marks(left, right, Math.max(2, width / 140), options.apart),
        text = options.xAxis(between, Math.max(Math.abs(left), Math.abs(right)));
      markTexts(
        context,
        along.map((x) => [place(x, width), text(x)]),
        height - 6,
        LEFT,
        width,
      );
      for (const [, shade, own, dots] of lines) {
        context.strokeStyle = context.fillStyle = color(shade);
        context.lineWidth = 1.5;
        let open = false,
          before = null;
        context.beginPath();
        for (const [x, y] of own) {
          if (y == null) {
            open = false;
            continue;
          }
          const [a, b] = [place(x, width), up(y)];
          if (dots) context.fillRect(a - 1.5, b - 1.5, 3, 3);
          else if (!open) context.moveTo(a, b);
          else {
            if (options.steps) context.lineTo(a, before);
            context.lineTo(a, b);
          }
          open = true;
          before = b;
        }
        if (!dots) context.stroke();
        if (!dots && own.length === 1 && own[0][1] != null)
          context.fillRect(place(own[0][0], width) - 2, up(own[0][1]) - 2, 4, 4);
      }
    },
    options.name,
  );
  canvas.addEventListener("mousemove", (event) => {
    const width = canvas.clientWidth;
    let best = null;
    for (const [name, , own] of lines)
      for (const [x, y] of own) {
        if (y == null) continue;
        const far = Math.hypot(place(x, width) - event.offsetX, up(y) - event.offsetY);
        if (!best || far < best[0]) best = [far, name, x, y];
      }
    show(event, best && best[0] < 40 ? best[1] + ": " + options.y(best[3]) + " at " + options.x(best[2]) : "");
  });
  canvas.addEventListener("mouseleave", (event) => show(event, ""));
  return canvas;
}
