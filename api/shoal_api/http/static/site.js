// What every page has: the search over everything (/), the help on keys (?), and the way to the account.
import { button, element, small } from "./dom.js";
import { bind, describeKeys, keysOfPage } from "./keys.js";
import { find, forget, signOf } from "./search_sources.js";

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
const palette = element("dialog", [box, list], { class: "palette", "aria-label": "Search everything" });
const keyList = element("dl", [], { class: "keys" });
const help = element("dialog", [element("h2", "Keys"), keyList, button("Close", () => help.close())], {
  class: "help",
  "aria-label": "Keys",
});
let turn = 0,
  timer = null,
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
box.addEventListener("keydown", (event) => {
  const options = [...list.children];
  if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    event.preventDefault();
    choose((chosen + (event.key === "ArrowDown" ? 1 : options.length - 1)) % Math.max(1, options.length));
  }
  if (event.key === "Enter" && options[chosen]?.dataset.href) {
    event.preventDefault();
    location.href = options[chosen].dataset.href;
  }
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

async function search() {
  const mine = ++turn,
    all = await find(box.value.trim());
  if (mine !== turn) return;
  list.replaceChildren(
    ...all.map(({ kind, name, href, more }, index) =>
      element("li", [signOf(kind), small(kind), " ", name, " ", ...(more ? [more] : [])], {
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
      element("li", "Nothing has this in its name, id, labels or notes.", {
        role: "option",
        "aria-disabled": "true",
        class: "dim",
      }),
    );
  choose(0);
}

function choose(index) {
  chosen = index;
  [...list.children].forEach((one, at) => one.setAttribute("aria-selected", String(at === index)));
  box.setAttribute("aria-activedescendant", list.children[index]?.id ?? "");
  list.children[index]?.scrollIntoView({ block: "nearest" });
}
