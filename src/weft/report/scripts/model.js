// ------------------------------------------------------------------------------------------ model
const shade = (sbp) => (sbp[0] === "S" ? "split" : sbp[0] === "P" ? "partial" : "broadcast");
function sbpGrid(laid) {
  // A square for each rank along an axis: the parts of a split differ, copies are alike.
  return make(
    "span",
    { class: "grids" },
    ...laid.layout.map((sbp, axis) => {
      const ranks = laid.grid[axis],
        shown = Math.min(ranks, 16),
        kind = shade(sbp);
      return make(
        "span",
        {
          class: "grid",
          title: sbp + " along axis " + axis + " of " + ranks + " ranks",
          style: "grid-template-columns:repeat(" + Math.min(shown, 8) + ",9px)",
        },
        ...Array.from({ length: shown }, (_, n) =>
          make("i", {
            style:
              "background:var(--" +
              kind +
              ");opacity:" +
              (kind === "split" ? 0.35 + (0.65 * n) / Math.max(1, shown - 1) : 1),
          }),
        ),
      );
    }),
    laid.layout.join(", "),
  );
}
function choiceTables(choice) {
  return choice.axes.flatMap((each) => {
    const chosen = each.rows.find((row) => row[0] === each.chosen),
      least = chosen ? chosen[4] : null;
    return [
      make("h3", { text: "along axis " + each.axis + " of " + each.ranks + " ranks: " + each.chosen }),
      make("p", {
        class: "dim",
        text: !chosen
          ? "Chosen before it was taken apart; its rule admits"
          : each.rows[0] === chosen
            ? "The cheapest here, with all other calls as they are."
            : "Not the cheapest by itself: other calls, which read what it makes, are cheaper so, or the strategy fixes it.",
      }),
      table(
        each.rows,
        [
          ["signature", (x) => x[0]],
          ["work", (x) => x[1], bytes, true],
          ["boxing", (x) => x[2], bytes, true],
          ["exchanges", (x) => x[3], null, true],
          ["all together", (x) => x[4], bytes, true],
          [
            "against the chosen",
            (x) => (least === null ? 0 : x[4] - least),
            (x) => (least === null || !x ? "" : (x > 0 ? "+" : "−") + bytes(Math.abs(x))),
            true,
          ],
        ],
        { marked: (x) => x === chosen },
      ),
    ];
  });
}
function variableText(row) {
  const spans = (laid) =>
    laid.layout.length
      ? make("p", {}, sbpGrid(laid), make("span", { class: "dim", text: " on ranks " + ranksText(laid.ranks) }))
      : "";
  return [
    make("p", {
      text: row.role + " " + row.dtype + "[" + row.shape.join(", ") + "], " + bytes(row.bytes) + ", stage " + row.stage,
    }),
    spans(row),
    ...row.why.map((each) => make("p", { class: "dim", text: each })),
    ...Object.entries(row.states).flatMap(([name, state]) => [
      make(
        "p",
        {},
        make("b", { text: "state " + name }),
        " " + state.dtype + "[" + state.shape.join(", ") + "], " + bytes(state.bytes),
      ),
      spans(state),
    ]),
  ];
}
function moduleText(report, row) {
  const under = make("div");
  function choose(call) {
    under.replaceChildren(
      make("h3", { text: call[0] }),
      make("p", { class: "dim", text: call[1] + ", " + call[2] + ": " + call[3] }),
      ...(call[4] >= 0
        ? choiceTables(report.model.choices[call[4]])
        : [make("p", { class: "dim", text: "It runs on one rank, or whole on each: there was nothing to choose." })]),
    );
  }
  const chosen = (call) =>
    call[4] < 0 ? "" : report.model.choices[call[4]].axes.map((each) => each.chosen).join("; ");
  return [
    make("p", {
      text:
        "stage " +
        row.stages.join(", ") +
        (row.again ? "; " + row.again + " calls are made again in the backward (recompute)" : ""),
    }),
    make("p", {}, make("b", { text: "lines " }), row.lines.join(", ")),
    table(
      row.calls,
      [
        ["op", (x) => x[0]],
        ["pass", (x) => x[2]],
        ["shapes", (x) => x[3]],
        ["signatures", chosen],
        ["times", (x) => x[5], null, true],
      ],
      { chosen: choose },
    ),
    make("p", { class: "dim", text: "A click on a call shows what the other signatures of its rule would have cost." }),
    under,
  ];
}
function model(report) {
  const root = { children: new Map(), rows: [], bytes: 0, stages: new Set(), again: 0, sharded: 0 };
  for (const row of report.model.rows) {
    let node = root;
    const path = row.path ? row.path.split(".") : ["(outside of modules)"];
    for (const part of ["", ...path]) {
      if (part) {
        if (!node.children.has(part))
          node.children.set(part, { children: new Map(), rows: [], bytes: 0, stages: new Set(), again: 0, sharded: 0 });
        node = node.children.get(part);
      }
      node.bytes += row.bytes || 0;
      node.again += row.again || 0;
      node.sharded += row.stored == null ? 0 : 1;
      for (const stage of row.stages || [row.stage]) node.stages.add(stage);
    }
    node.rows.push(row);
  }
  const several = root.stages.size > 1;
  const side = make("div", { class: "dim chosenside", text: "Choose a module or a parameter." });
  let chosen = null;
  function choose(element, path, rows) {
    if (chosen) chosen.classList.remove("chosen");
    (chosen = element).classList.add("chosen");
    side.classList.remove("dim");
    side.replaceChildren(
      make("h2", { text: path }),
      ...(rows.length
        ? rows.flatMap((row) => (row.role === "module" ? moduleText(report, row) : variableText(row)))
        : [make("p", { class: "dim", text: "It makes no call of its own; open it for what is below." })]),
    );
  }
  function branch(name, node, path) {
    const text = [
      make("b", { text: name }),
      " ",
      make("span", { class: "dim", text: node.bytes ? bytes(node.bytes) : "" }),
      " ",
    ];
    if (several && node.stages.size === 1)
      text.push(make("span", { class: "tag", text: "stage " + [...node.stages][0] }));
    const leaf = node.rows.find((row) => row.layout);
    if (leaf && leaf.stored != null)
      text.push(
        make("span", {
          class: "tag",
          text: leaf.why.find((each) => each.startsWith("ZeRO"))?.split(",")[0] || "in shards",
        }),
      );
    if (node.again) text.push(make("span", { class: "tag", text: "recompute" }));
    if (leaf && leaf.layout.length) text.push(sbpGrid(leaf));
    const keys = (act) => (event) => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        act();
      }
    };
    if (!node.children.size) {
      const item = make("div", { class: "leaf", tabindex: "0", role: "button" }, ...text),
        act = () => choose(item, path, node.rows);
      item.addEventListener("click", act);
      item.addEventListener("keydown", keys(act));
      return make("li", {}, item);
    }
    const head = make("summary", {}, ...text),
      list = make("ul");
    const found = make(
      "details",
      path.split(".").length < 2 && root.children.size + node.children.size < 80 ? { open: "" } : {},
      head,
      list,
    );
    const open = () => {
      if (found.open && !list.childElementCount)
        list.append(...[...node.children].map(([key, child]) => branch(key, child, path + "." + key)));
    };
    open();
    found.addEventListener("toggle", open);
    head.addEventListener("click", () => choose(head, path, node.rows));
    return make("li", {}, found);
  }
  return [
    legend(
      ["split", "split: ranks hold parts"],
      ["broadcast", "broadcast: ranks hold copies"],
      ["partial", "partial: ranks hold terms of a sum"],
      make("span", { text: "a square for each rank along an axis" }),
    ),
    make(
      "div",
      { class: "tree" },
      make("div", {}, make("ul", {}, ...[...root.children].map(([key, child]) => branch(key, child, key)))),
      side,
    ),
  ];
}
