// What every page has: the search over everything (/), the help on keys (?), and the way to the account.
import { button, element, small } from "./dom.js";
import { bind, describeKeys, keysOfPage, onKeys } from "./keys.js";
import { find, forget, signOf } from "./search_sources.js";
import { latest } from "./reading.js";

const PAUSE_MS = 150;

const box = element("input", null, {
  type: "search",
  role: "combobox",
  "aria-expanded": "true",
  "aria-controls": "site-found",
  "aria-autocomplete": "list",
  "aria-label": "Search everything",
  placeholder: "jobs, notes, labels, models, views, nodes, pages",
  autocomplete: "off",
  spellcheck: "false",
});
const list = element("ul", [], { id: "site-found", role: "listbox", "aria-label": "Found" });
const palette = element("dialog.palette", [box, list], { "aria-label": "Search everything" });
const keyList = element("dl.keys", []);
const help = element("dialog.help", [element("h2", "Keys"), keyList, button("Close", () => help.close())], {
  "aria-label": "Keys",
});
let timer = null,
  chosen = 0;

document.body.append(palette, help);
document.querySelector("header nav").append(
  button("Search /", openPalette, { class: "quiet", id: "site-search" }),
  element("a", "Account", {
    href: "/account",
    ...(location.pathname === "/account" ? { "aria-current": "page" } : {}),
  }),
  button("?", openHelp, { class: "quiet", "aria-label": "Keys" }),
);
bind("/", openPalette);
bind("?", openHelp);
describeKeys("↑ ↓ Enter", "in the search: choose and open");
if (document.querySelector("[role=tablist]"))
  describeKeys("← → Home End", "in tabs: the tab before, after, first, last");
box.addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(search, PAUSE_MS);
});
const step = (by) => choose((chosen + by(list.children.length)) % Math.max(1, list.children.length));
onKeys(box, {
  ArrowDown: () => step(() => 1),
  ArrowUp: () => step((num) => num - 1),
  Enter: () => {
    const { href } = list.children[chosen]?.dataset ?? {};
    if (href) location.href = href;
  },
});

function openHelp() {
  keyList.replaceChildren(
    ...keysOfPage().flatMap(([key, words]) => [element("dt", element("kbd", key)), element("dd", words)]),
  );
  help.showModal();
}

function openPalette() {
  box.value = "";
  forget();
  palette.showModal();
  search();
}

// A part that is wider than the screen is scrolled, so the keyboard reaches it; one that fits is no stop of Tab.
const reach = new ResizeObserver((entries) => {
  for (const part of new Set(entries.map(({ target }) => target.closest(".wide")))) {
    if (!part) continue;
    if (part.scrollWidth > part.clientWidth || part.closest("details:not([open])")) part.tabIndex = 0;
    else part.removeAttribute("tabindex");
  }
});
for (const part of document.querySelectorAll(".wide"))
  for (const one of [part, ...part.querySelectorAll("table")]) reach.observe(one);

const search = latest(
  () => find(box.value.trim()),
  (all) => {
    list.replaceChildren(
      ...all.map(({ kind, name, href, more }, index) =>
        element("li", [signOf(kind), small(kind), " ", name, " ", more], {
          role: "option",
          id: `site-found-${index}`,
          "data-href": href,
          "data-kind": kind,
          class: index && all[index - 1].kind !== kind ? "first" : undefined,
          click: () => {
            location.href = href;
          },
        }),
      ),
    );
    if (!all.length)
      list.replaceChildren(
        element("li.dim", "Nothing has this in its name, id, labels or notes.", {
          role: "option",
          "aria-disabled": "true",
        }),
      );
    choose(0);
  },
);

function choose(index) {
  chosen = index;
  [...list.children].forEach((one, at) => one.setAttribute("aria-selected", String(at === index)));
  box.setAttribute("aria-activedescendant", list.children[index]?.id ?? "");
  list.children[index]?.scrollIntoView({ block: "nearest" });
}
