// What people have written about a job: labels, tags and notes, edited in place, also after the job has ended; and whether it is archived.
import { $, element, refill } from "./dom.js";
import { ask } from "./dialog.js";
import { jobPath, request } from "./api.js";
import { moment } from "./format.js";
import { markdown } from "./markdown.js";
import { ENDED } from "./states.js";

const NOTES = "notes", MOST = 4096;
let shown = null, changed = null;

// Called with the job after each change: the stream of a job that has ended says nothing any more.
export function whenDescribed(handle) { changed = handle; }

export function showDescription(job) {
  shown = job;
  const labels = Object.entries(job.spec.labels ?? {}), notes = job.spec.annotations?.[NOTES] ?? "";
  refill($("labels"), labels.map(([name, value]) => element("span", value === "" ? name : `${name}=${value}`, { class: "badge" })));
  if ($("notes").dataset.text !== notes) { $("notes").dataset.text = notes; $("notes").replaceChildren(...markdown(notes)); }
  $("undescribed").hidden = labels.length > 0 || Boolean(notes);
  const archived = job.archived_at !== null && job.archived_at !== undefined;
  $("archive").hidden = !ENDED.has(job.status.state);
  $("archive").textContent = archived ? "Unarchive" : "Archive";
  $("archived-at").textContent = archived ? `Archived ${moment(job.archived_at)}: lists leave the job out.` : "";
}

const patch = async (body) => changed(await request(jobPath(shown.id), { method: "PATCH", body }));

$("edit-notes").addEventListener("click", () => {
  const field = element("textarea", shown.spec.annotations?.[NOTES] ?? "", { id: "dialog-value", rows: 12, maxlength: MOST, "aria-label": "Notes" });
  ask({ title: "Notes", confirm: "Save", input: [field], words: async (text) => `Markdown, for all who see the job: ${text.length} of ${MOST} letters. It is kept as the annotation \`${NOTES}\`.`,
    send: (text) => patch({ annotations: { [NOTES]: text.trim() ? text : null } }) });
});

// A line for each label; a line without a sign is a tag, a label without a value.
$("edit-labels").addEventListener("click", () => {
  const before = shown.spec.labels ?? {};
  const lines = Object.entries(before).map(([name, value]) => value === "" ? name : `${name}=${value}`);
  const field = element("textarea", lines.join("\n"), { id: "dialog-value", rows: 8, "aria-label": "Labels", spellcheck: "false" });
  ask({ title: "Labels and tags", confirm: "Save", input: [field], words: async () => "A line for each: NAME=VALUE, or NAME alone for a tag. Jobs are found by them: label.NAME in a condition.",
    send: (text) => {
      const after = Object.fromEntries(text.split("\n").map((line) => line.trim()).filter(Boolean).map((line) => { const [, name, value] = /^([^=]*)=?(.*)$/.exec(line); return [name.trim(), value]; }));
      const gone = Object.fromEntries(Object.keys(before).filter((name) => !(name in after)).map((name) => [name, null]));
      return patch({ labels: { ...after, ...gone } });
    } });
});

$("archive").addEventListener("click", () => {
  const verb = shown.archived_at ? "unarchive" : "archive";
  ask({ title: shown.archived_at ? "Unarchive" : "Archive", confirm: shown.archived_at ? "Unarchive" : "Archive",
    words: async () => shown.archived_at ? "The job is in the lists again." : "Lists leave the job out, unless archived jobs are asked for. Nothing is deleted.",
    send: async () => changed(await request(`${jobPath(shown.id)}/${verb}`, { method: "POST" })) });
});
