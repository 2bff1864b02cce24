// ------------------------------------------------------------------------------------------ lanes
// The columns of a rank as arrays, made when it is first drawn.
function columns(rank) {
  if (rank.at) return rank;
  const count = rank.begin.length,
    at = new Float64Array(count);
  let now = 0;
  for (let n = 0; n < count; n++) {
    now += rank.begin[n];
    at[n] = now;
  }
  rank.at = at;
  // Where each queue begins; slices are sorted by queue, then by begin. And the longest slice of each.
  rank.first = rank.queues.map(() => 0);
  rank.past = rank.queues.map(() => 0);
  rank.longest = rank.queues.map(() => 0);
  for (let n = count - 1; n >= 0; n--) rank.first[rank.queue[n]] = n;
  for (let n = 0; n < count; n++) {
    const queue = rank.queue[n];
    rank.past[queue] = n + 1;
    rank.longest[queue] = Math.max(rank.longest[queue], rank.took[n]);
  }
  return rank;
}
function busy(rank, kinds) {
  // When the rank computes: begins and ends of intervals that do not touch.
  if (rank.busy) return rank.busy;
  columns(rank);
  const place = rank.queues.indexOf("compute"),
    begins = [],
    ends = [];
  for (let n = place < 0 ? 0 : rank.first[place]; n < (place < 0 ? 0 : rank.past[place]); n++) {
    if (kinds[rank.kind[n]][0] !== "compute" || !rank.took[n]) continue;
    const begin = rank.at[n],
      end = begin + rank.took[n];
    if (begins.length && begin <= ends[ends.length - 1]) ends[ends.length - 1] = Math.max(ends[ends.length - 1], end);
    else {
      begins.push(begin);
      ends.push(end);
    }
  }
  return (rank.busy = [begins, ends]);
}
function firstAt(array, value, low = 0, high = array.length) {
  // The first place whose value is at least this.
  while (low < high) {
    const middle = (low + high) >> 1;
    if (array[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}
function gaps(rank, kinds, begin, end) {
  // The parts of an interval in which the rank does not compute.
  const [begins, ends] = busy(rank, kinds),
    found = [];
  for (let n = firstAt(ends, begin), from = begin; from < end; n++) {
    const until = n < begins.length ? Math.min(begins[n], end) : end;
    if (until > from) found.push([from, until]);
    if (n >= begins.length) break;
    from = Math.max(from, ends[n]);
  }
  return found;
}
const FOLDED = 16,
  ROW = 18,
  GAP = 5;
function lanesOf(report, open) {
  // A lane for each queue of ranks that are open, one for each other rank.
  const found = [];
  for (const group of report.time.groups)
    for (const rank of group.ranks) {
      // The rank first: of a narrow window it is what is left.
      const name = "rank " + rank.rank + " " + group.group,
        key = group.group + " " + rank.rank;
      if (open.has(key))
        rank.queues.forEach((queue, place) => {
          if (columns(rank).past[place] || queue === "compute")
            found.push({ group, rank, key, place, queue, name: place ? queue : name + " " + queue, head: !place });
        });
      else found.push({ group, rank, key, place: -1, queue: "", name, head: true });
    }
  return found;
}
function slicesAt(lane, from, to) {
  // The places of the slices that may be seen between two times, of each queue of a lane: [first, past] pairs.
  const rank = columns(lane.rank),
    places = lane.place < 0 ? rank.queues.map((_, n) => n) : [lane.place];
  return places.map((place) => [
    firstAt(rank.at, from - rank.longest[place], rank.first[place], rank.past[place]),
    firstAt(rank.at, to, rank.first[place], rank.past[place]),
  ]);
}
function paintLane(context, lane, y, view, found, report) {
  const { from, to, left, width, offset } = view,
    rank = columns(lane.rank),
    kinds = report.time.kinds,
    words = report.time.words;
  const place = (t) => left + ((t - offset - from) / (to - from)) * (width - left);
  const box = (a, b, shade, top, high, alpha = 1) => {
    const x = Math.max(left, place(a)),
      end = Math.min(width, place(b));
    context.globalAlpha = alpha;
    context.fillStyle = shade;
    context.fillRect(x, y + top, Math.max(0.7, end - x), high);
    context.globalAlpha = 1;
  };
  const whole = lane.place < 0;
  for (const [first, past] of slicesAt(lane, from + offset, to + offset)) {
    const last = { compute: -1, communication: -1, host: -1, wait: -1 };
    for (let n = first; n < past; n++) {
      const begin = rank.at[n],
        end = begin + rank.took[n],
        kind = kinds[rank.kind[n]][0],
        right = place(end);
      if (right < left || right <= last[kind]) continue; // nothing of it would be seen
      last[kind] = Math.max(right, place(begin) + 0.7);
      const full = rank.full.length ? 0.25 + (0.75 * rank.full[n]) / 100 : 1;
      if (kind === "communication") {
        if (!whole) box(begin, end, found.hidden, 0, ROW, full);
        else box(begin, end, found.hidden, ROW - 5, 5, full);
        const bare =
          right - place(begin) < 1.5
            ? gaps(rank, kinds, (begin + end) / 2, (begin + end) / 2 + 1).length
              ? [[begin, end]]
              : []
            : gaps(rank, kinds, begin, end);
        for (const [a, b] of bare) box(a, b, found.exposed, 0, ROW, full);
      } else if (kind === "wait") {
        if (!whole || lane.rank.queues[rank.queue[n]] === "compute")
          box(begin, end, found.wait, whole ? 0 : 4, whole ? ROW : ROW - 8, 0.45 * full);
      } else if (!whole || kind === "compute") box(begin, end, found[kind], 0, whole ? ROW - 5 : ROW, full);
      const x = Math.max(left, place(begin)),
        room = Math.min(width, right) - x;
      if (room > 46 && kind !== "wait" && !(whole && kind === "communication")) {
        context.fillStyle = "#ffffff";
        context.fillText(fit(context, words[kinds[rank.kind[n]][1]], room - 8), x + 4, y + (whole ? 11 : 13));
      }
    }
  }
}
function sliceUnder(lane, time, slack, report) {
  // The slice of a lane at a time: the shortest of those there.
  const rank = columns(lane.rank);
  let best = -1;
  for (const [first, past] of slicesAt(lane, time - slack, time + slack))
    for (let n = first; n < past; n++)
      if (
        rank.at[n] - slack <= time &&
        time <= rank.at[n] + rank.took[n] + slack &&
        (best < 0 || rank.took[n] < rank.took[best])
      )
        best = n;
  return best;
}
function sliceText(report, lane, n) {
  const rank = lane.rank,
    [kind, name, details] = report.time.kinds[rank.kind[n]],
    words = report.time.words;
  const begin = rank.at[n],
    end = begin + rank.took[n],
    from = stepOf(report, lane.group)?.[1] || 0;
  const bare =
    kind === "communication" ? gaps(rank, report.time.kinds, begin, end).reduce((sum, [a, b]) => sum + b - a, 0) : 0;
  const micro = rank.micro.length && rank.micro[n] >= 0 ? ", micro-batch " + rank.micro[n] : "";
  const part = rank.full.length && rank.full[n] < 100 ? ", " + rank.full[n] + " % of which they take" : "";
  return (
    words[name] +
    ": " +
    ticks(rank.took[n]) +
    part +
    " from " +
    ticks(begin - from) +
    (kind === "communication" ? ", exposed " + ticks(bare) : "") +
    micro +
    (words[details] ? "; " + words[details] : "")
  );
}
