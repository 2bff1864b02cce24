// ------------------------------------------------------------------------------------------ views
const VIEWS = [
  ["Summary", summary, (x) => x.summary.text || x.notes.length],
  ["Model", model, (x) => x.model.rows?.length],
  ["Time", timelines, (x) => x.time.length],
  ["Memory", memory, (x) => x.memory.length],
  ["Bytes", matrix, (x) => x.sent.cells],
  ["Search", search, (x) => x.search.tried],
  ["Run", figures, (x) => Object.keys(x.figures).length],
].filter(([, , there]) => reports.some(there));
const buttons = VIEWS.map(([name, view, there], place) => {
  const section = make("section", {
    role: "tabpanel",
    id: "view-" + name.toLowerCase(),
    "aria-label": name,
    hidden: "",
  });
  const button = make("button", {
    role: "tab",
    text: name,
    "aria-selected": "false",
    "aria-controls": section.id,
    tabindex: "-1",
    onclick: () => {
      history.replaceState(null, "", "#" + name.toLowerCase());
      open();
    },
  });
  function open() {
    nav.querySelectorAll("button").forEach((each) => {
      each.setAttribute("aria-selected", String(each === button));
      each.tabIndex = each === button ? 0 : -1;
    });
    main.querySelectorAll("section").forEach((each) => {
      each.hidden = each !== section;
    });
    if (section.childElementCount) return;
    const sides = reports.map((report) =>
      make(
        "div",
        {},
        ...(reports.length > 1 ? [make("h2", { class: "whose", text: report.title })] : []),
        ...(there(report) ? view(report) : [make("p", { class: "dim", text: "not in this report" })]),
      ),
    );
    if (reports.length > 1 && !place) section.append(...comparison());
    section.append(reports.length > 1 ? make("div", { class: "side" }, ...sides) : sides[0]);
  }
  button.openView = open;
  button.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (by) {
      const next = buttons[(place + by + buttons.length) % buttons.length];
      next.focus();
      next.click();
    }
  });
  nav.append(button);
  main.append(section);
  return button;
});
function byAddress() {
  (buttons.find((each) => "#" + each.textContent.toLowerCase() === location.hash) || buttons[0])?.openView();
}
addEventListener("hashchange", byAddress);
byAddress();
if (!buttons.length) main.append(make("p", { class: "dim", text: "There is nothing in this report." }));
document.documentElement.dataset.ready = "yes";
