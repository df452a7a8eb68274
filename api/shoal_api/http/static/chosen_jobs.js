// The jobs that are chosen in the table, and what is done to all of them: each deed says first what it will do to how many.
import { $, button, element, fillEach } from "./dom.js";
import { ask } from "./dialog.js";
import { jobPath, patch, post, remove } from "./api.js";
import { plural, whole } from "./format.js";
import { everyJob } from "./job_query.js";

const chosen = new Map(); // id -> name
let shown = [],
  total = 0,
  last = null,
  changed = () => {};

// In the head of the table: all jobs of the page, or none.
export const pageBox = element("input", null, {
  type: "checkbox",
  id: "choose-page",
  "aria-label": "Select the jobs of this page",
  click: () => {
    for (const one of shown) choose(one.id, one.name, pageBox.checked);
    refresh();
  },
});

const LABELS = "team=speech draft-";
// A deed without `send` is a verb of the service.
const DEEDS = [
  { title: "Pause", words: "Each saves a checkpoint and releases its workers. No step is lost." },
  { title: "Resume", words: "Paused jobs return to the queue and go on from their checkpoints." },
  { title: "Cancel", words: "They end. This cannot be undone; their checkpoints are kept.", danger: true },
  {
    title: "Archive",
    words:
      "Lists leave them out, unless archived jobs are asked for. Nothing is deleted. Only jobs that have ended can be archived.",
  },
  { title: "Unarchive", words: "They are in the lists again." },
  {
    title: "Label",
    words: "NAME=VALUE sets a label, NAME= a tag without a value, NAME- removes it. Separate several by spaces.",
    input: () => element("input", null, { id: "dialog-value", "aria-label": "Labels", size: 40, placeholder: LABELS }),
    send: (text) => labelling(text),
  },
  {
    title: "Delete",
    words:
      "Their histories and checkpoints are deleted. This cannot be undone. Only jobs that have ended can be deleted; pinned checkpoints stay.",
    danger: true,
    send: () => (id) => remove(jobPath(id)),
  },
];

function labelling(text) {
  const labels = {};
  for (const word of text.split(/\s+/).filter(Boolean)) {
    const [, name, value] = /^([^=]+)=(.*)$/.exec(word) ?? [
      null,
      word.replace(/-$/, ""),
      word.endsWith("-") ? null : undefined,
    ];
    if (value === undefined) throw new Error(`${word} changes nothing: write ${word}=VALUE, or ${word}- to remove it.`);
    labels[name] = value;
  }
  if (!Object.keys(labels).length) throw new Error("Write a label, such as team=speech.");
  return (id) => patch(jobPath(id), { labels });
}

// One after the other. Those that are refused stay chosen, and the dialog says why.
async function each(deed, value) {
  const change = deed.send?.(value) ?? ((id) => post(`${jobPath(id)}/${deed.title.toLowerCase()}`)),
    refused = [];
  for (const [id, name] of [...chosen]) {
    try {
      await change(id);
      choose(id, name, false);
    } catch (error) {
      refused.push(`${name}: ${error.message}`);
    }
  }
  refresh();
  if (refused.length)
    throw new Error(`${refused.slice(0, 5).join("\n")}${refused.length > 5 ? `\nand ${refused.length - 5} more` : ""}`);
}

function open(deed) {
  const names = [...chosen.values()];
  const listed = element(
    "p.dim.small",
    `${names.slice(0, 8).join(", ")}${names.length > 8 ? ` and ${names.length - 8} more` : ""}`,
  );
  ask({
    title: `${deed.title} ${plural(chosen.size, "job")}`,
    confirm: `${deed.title} ${chosen.size}`,
    input: [listed, deed.input?.()],
    words: deed.words,
    send: (value) => each(deed, value),
  });
}

function choose(id, name, is) {
  if (is) chosen.set(id, name);
  else chosen.delete(id);
}

function refresh() {
  for (const box of document.querySelectorAll("#jobs .pick input"))
    box.checked = chosen.has(box.closest("tr").dataset.id);
  const num = shown.filter(({ id }) => chosen.has(id)).length;
  pageBox.checked = num > 0 && num === shown.length;
  pageBox.indeterminate = num > 0 && num < shown.length;
  $("num-chosen").textContent = `${plural(chosen.size, "job")} selected`;
  $("choose-all").textContent = `Select all ${whole(total)}`;
  $("choose-all").hidden = chosen.size >= total;
  if (!chosen.size && $("chosen-bar").contains(document.activeElement)) pageBox.focus();
  $("chosen-bar").hidden = chosen.size === 0;
  $("compare").disabled = chosen.size < 2 || chosen.size > 10;
  $("compare").textContent = `Compare ${chosen.size}`;
  changed();
}

// The box of a row. With the shift key all rows between it and the last one are chosen too.
export function box(job) {
  const made = element("input", null, {
    type: "checkbox",
    "aria-label": `Select ${job.name}`,
    click: (event) => {
      const ids = shown.map((one) => one.id),
        from = event.shiftKey && ids.includes(last) ? ids.indexOf(last) : ids.indexOf(job.id),
        to = ids.indexOf(job.id);
      for (const one of shown.slice(Math.min(from, to), Math.max(from, to) + 1)) choose(one.id, one.name, made.checked);
      last = job.id;
      refresh();
    },
  });
  made.checked = chosen.has(job.id);
  return element("label.hit", made);
}

export function showChosen(fleet) {
  shown = fleet.items;
  total = fleet.total;
  refresh();
}

export const chosenIds = () => [...chosen.keys()];

// `onChange` is called after each choice.
export function setUpChosen(view, onChange) {
  changed = onChange;
  fillEach("deeds", DEEDS, (deed) =>
    button(deed.title, () => open(deed), { class: deed.danger ? "danger" : "", "data-deed": deed.title.toLowerCase() }),
  );
  $("choose-none").addEventListener("click", () => {
    chosen.clear();
    refresh();
  });
  $("choose-all").addEventListener("click", async () => {
    $("choose-all").disabled = true;
    try {
      for (const one of await everyJob(view)) choose(one.id, one.name, true);
    } finally {
      $("choose-all").disabled = false;
      refresh();
      $("choose-none").focus();
    }
  });
  $("compare").addEventListener("click", () => {
    location.href = `/compare?jobs=${[...chosen.keys()].join(",")}`;
  });
  refresh();
}
