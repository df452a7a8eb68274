// The tabs of a page, made from its panels: <div data-tab="logs" data-words="Logs">. The address names the open one, #tab=logs, and may
// hold more for it, #tab=logs&line=12. Keys as in the ARIA pattern: arrows, Home and End; only the open tab is reached by Tab.
import { button } from "./dom.js";

export const address = () => new URLSearchParams(location.hash.slice(1));

// `whenOpened`: called with the name of a tab and what the address holds, once at the beginning and after each change.
export function setUpTabs(list, whenOpened) {
  const panels = [...document.querySelectorAll("[data-tab]")],
    tabs = new Map();
  const open = (name, more = {}, focus = false) => {
    for (const panel of panels) {
      const chosen = panel.dataset.tab === name,
        tab = tabs.get(panel.dataset.tab);
      panel.hidden = !chosen;
      tab.setAttribute("aria-selected", String(chosen));
      tab.tabIndex = chosen ? 0 : -1;
      if (chosen) {
        tab.scrollIntoView?.({ block: "nearest", inline: "nearest" });
        if (focus) tab.focus();
      }
    }
    whenOpened(name, new URLSearchParams(more));
  };
  const go = (name, more = {}, focus = false) => {
    history.replaceState(null, "", `#${new URLSearchParams({ tab: name, ...more })}`);
    open(name, more, focus);
  };
  const names = panels.map((panel) => panel.dataset.tab);
  for (const panel of panels) {
    const name = panel.dataset.tab;
    panel.id ||= `panel-${name}`;
    panel.setAttribute("role", "tabpanel");
    panel.setAttribute("aria-labelledby", `tab-${name}`);
    tabs.set(
      name,
      button(panel.dataset.words, () => go(name), { role: "tab", id: `tab-${name}`, "aria-controls": panel.id }),
    );
  }
  list.replaceChildren(...tabs.values());
  list.addEventListener("keydown", (event) => {
    const at = names.findIndex((name) => tabs.get(name) === event.target),
      last = names.length - 1;
    const next = { ArrowRight: at === last ? 0 : at + 1, ArrowLeft: at ? at - 1 : last, Home: 0, End: last }[event.key];
    if (at < 0 || next === undefined) return;
    event.preventDefault();
    go(names[next], {}, true);
  });
  const fromAddress = () => {
    const { tab, ...more } = Object.fromEntries(address());
    open(names.includes(tab) ? tab : names[0], more);
  };
  addEventListener("hashchange", fromAddress);
  fromAddress();
  return go;
}
