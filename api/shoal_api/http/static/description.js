// What people have written about a job: labels, tags and notes, edited in place, also after the job has ended; and whether it is archived.
// Notes are saved only over those that the writer has seen: if somebody else has saved others meanwhile, both are shown, and
// the writer chooses. A label is a change of its own, so two people who add labels disturb nobody.
import { $, attempt, button, element, fill, fillEach, onSubmit } from "./dom.js";
import { ask } from "./dialog.js";
import { jobPath, patch, post, request, whoami } from "./api.js";
import { moment } from "./format.js";
import { onKey, onKeys } from "./keys.js";
import { markdown } from "./markdown.js";
import { ENDED } from "./states.js";

const NOTES = "notes",
  MOST = 4096,
  PRECONDITION_FAILED = 412;
let shown = null,
  changed = null,
  base = null,
  may = false; // base: the notes that the writer has seen; null: nobody writes

// Called with the job after each change: the stream of a job that has ended says nothing any more.
export function whenDescribed(handle) {
  changed = handle;
}

export function showDescription(job) {
  shown = job;
  showLabels(Object.entries(job.spec.labels ?? {}));
  const notes = notesOf(job);
  if ($("notes").dataset.text !== notes) {
    $("notes").dataset.text = notes;
    fill("notes", markdown(notes));
  }
  if (base !== null && notes !== base) showConflict(notes);
  $("undescribed").hidden = Boolean(notes) || base !== null;
  const archived = job.archived_at !== null && job.archived_at !== undefined;
  $("archive").hidden = !ENDED.has(job.status.state);
  $("archive").textContent = archived ? "Unarchive" : "Archive";
  $("archived-at").textContent = archived ? `Archived ${moment(job.archived_at)}: lists leave the job out.` : "";
}

const notesOf = (job) => job.spec.annotations?.[NOTES] ?? "";
const write = async (body, ifMatch) => changed(await patch(jobPath(shown.id), body, { ifMatch }));

function showLabels(labels) {
  const key = JSON.stringify([may, labels]);
  if ($("labels").dataset.shown === key) return;
  $("labels").dataset.shown = key;
  fillEach("labels", labels, ([name, value]) => {
    const words = value === "" ? name : `${name}=${value}`;
    return element("span.badge", [
      words,
      may
        ? button("×", () => setLabels({ [name]: null }), { class: "quiet", "aria-label": `Remove the label ${words}` })
        : null,
    ]);
  });
}

const setLabels = (labels) => attempt(() => write({ labels }), "label-error");

onSubmit("add-label", async () => {
  const [, name, value] = /^([^=]*)=?(.*)$/.exec($("label").value.trim());
  if (name.trim() && (await setLabels({ [name.trim()]: value.trim() }))) $("label").value = "";
});
onKeys($("label"), {
  Escape: () => {
    $("label").value = "";
    $("label-error").textContent = "";
    $("label").blur();
  },
});

function edit() {
  if (!may || !shown || base !== null) return;
  base = notesOf(shown);
  $("notes-text").value = base;
  $("notes-error").textContent = "";
  $("notes-editor").hidden = false;
  $("notes").hidden = $("undescribed").hidden = $("edit-notes").hidden = $("notes-conflict").hidden = true;
  preview();
  $("notes-text").focus();
}

function close() {
  base = null;
  $("notes-editor").hidden = true;
  $("notes").hidden = $("edit-notes").hidden = false;
  showDescription(shown);
  $("edit-notes").focus();
}

function preview() {
  const text = $("notes-text").value;
  fill("notes-preview", markdown(text));
  $("notes-length").textContent = `Markdown, ${text.length} of ${MOST} letters`;
}

// What somebody else has saved while one writes; it may be what one has written, too.
function showConflict(theirs) {
  if (theirs === $("notes-text").value) {
    base = theirs;
    $("notes-conflict").hidden = true;
    return;
  }
  $("notes-theirs").textContent = theirs || "(nothing)";
  $("notes-conflict").hidden = false;
}

async function save() {
  const text = $("notes-text").value;
  if (notesOf(shown) !== base) return showConflict(notesOf(shown));
  $("save-notes").disabled = true;
  try {
    await write({ annotations: { [NOTES]: text.trim() ? text : null } }, `"${shown.etag}"`);
    close();
  } catch (error) {
    if (error.status !== PRECONDITION_FAILED) $("notes-error").textContent = error.message;
    else {
      changed(await request(jobPath(shown.id)));
      if (notesOf(shown) === base) return save();
    } // another setting has changed, not the notes
  } finally {
    $("save-notes").disabled = false;
  }
}

function settle(text) {
  base = notesOf(shown);
  $("notes-text").value = text;
  $("notes-conflict").hidden = true;
  preview();
  $("notes-text").focus();
}

function leave() {
  if ($("notes-text").value === base) return close();
  ask({
    title: "Leave the notes as they were",
    confirm: "Throw away",
    words: "What you have written since you began is lost.",
    send: async () => close(),
  });
}

$("notes-text").maxLength = MOST;
$("notes-text").addEventListener("input", preview);
onSubmit("notes-editor", save);
$("notes-editor").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    save();
  }
  if (event.key === "Escape") {
    event.preventDefault();
    leave();
  }
});
$("leave-notes").addEventListener("click", leave);
$("edit-notes").addEventListener("click", edit);
$("notes").addEventListener("click", (event) => {
  if (!event.target.closest("a") && !String(getSelection())) edit();
});
$("notes-both").addEventListener("click", () => settle(`${$("notes-text").value.trimEnd()}\n\n${notesOf(shown)}`));
$("notes-mine").addEventListener("click", () => {
  settle($("notes-text").value);
  save();
});
$("notes-take").addEventListener("click", () => settle(notesOf(shown)));
addEventListener("beforeunload", (event) => {
  if (base !== null && $("notes-text").value !== base) event.preventDefault();
});
const fromKey = (act) => () => {
  if (!may || !shown) return;
  $("tab-overview").click();
  act();
};
onKey("n", "write notes", fromKey(edit));
onKey(
  "l",
  "add a label",
  fromKey(() => $("label").focus()),
);

whoami().then(
  (me) => {
    may = me.permissions.includes("jobs:change");
    $("add-label").hidden = $("edit-notes").hidden = !may;
    $("archive").disabled = !may;
    $("notes").classList.toggle("writable", may);
    if (shown) showDescription(shown);
  },
  () => {},
);

$("archive").addEventListener("click", () => {
  const [title, words] = shown.archived_at
    ? ["Unarchive", "The job is in the lists again."]
    : ["Archive", "Lists leave the job out, unless archived jobs are asked for. Nothing is deleted."];
  const send = async () => changed(await post(`${jobPath(shown.id)}/${title.toLowerCase()}`));
  ask({ title, words, send });
});
