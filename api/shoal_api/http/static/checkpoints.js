// The durable checkpoints of a job, newest first, with what can be done about each.
import { $, button, element, rows } from "./dom.js";
import { ask } from "./dialog.js";
import { jobPath, modelPage, post, put, remove } from "./api.js";
import { ENDED } from "./states.js";
import { bytes, moment, plural, seconds, whole } from "./format.js";
import { exporting } from "./exporting.js";
import { register } from "./registering.js";

const COLOURS = { committed: "done", damaged: "bad", failed: "bad", deleted: "dim" };
let shown = null,
  marked = null;

// Of the state of the page: its job, and its checkpoints.
export function showCheckpoints(state) {
  shown = state;
  const { checkpoints } = state;
  rows("checkpoints", [...checkpoints].reverse(), (one) => [
    whole(one.step),
    element(
      "span",
      one.state +
        (one.pinned ? ", pinned" : "") +
        (one.best === 1 ? `, best (${Number(one.score.toPrecision(4))})` : one.best ? `, ${one.best}. best` : ""),
      { class: COLOURS[one.state] },
    ),
    moment(one.committed_at),
    bytes(one.bytes),
    seconds(one.seconds),
    seconds(one.stall_s),
    one.world_size || "–",
    element("code", nameOf(one), { title: one.url }),
    buttons(one),
    { title: one.message, "data-step": one.step, class: one.step === marked ? "chosen" : "" },
  ]);
}

// The row of the step that the address names, #tab=checkpoints&step=10: from the page of a job or a model that comes from it.
export function goToStep(step) {
  marked = step;
  for (const one of $("checkpoints").rows) one.classList.toggle("chosen", Number(one.dataset.step) === step);
  $("checkpoints").querySelector(".chosen")?.scrollIntoView({ block: "center" });
}

function buttons(one) {
  const made = [];
  if (one.pinned) made.push(deed("Unpin", one, () => unpin(one)));
  else if (one.state === "committed") made.push(deed("Pin", one, () => pin(one)));
  if (one.state === "committed")
    made.push(
      deed("Export", one, () => exporting(shown.job, [one])),
      deed("Register", one, () => register({ job: shown.job.id, step: one.step, size: one.bytes }, opened)),
    );
  if (one.state === "committed" || one.state === "damaged")
    made.push(
      deed("Verify", one, () => verify(one)),
      deed("Delete", one, () => deletion(one)),
    );
  return made.length ? element("span.controls", made) : "";
}

const opened = (version) => {
  location.href = modelPage(version);
};
const deed = (words, one, action) =>
  button(words, () => ask(action()), {
    "data-checkpoint": `${words.toLowerCase()}-${one.step}`,
    "aria-label": `${words} the checkpoint of step ${one.step}`,
  });
const nameOf = (one) => `step-${String(one.step).padStart(12, "0")}-a${one.attempt}-g${one.generation}`;
const path = (one) => `${jobPath(shown.job.id)}/checkpoints/${encodeURIComponent(nameOf(one))}`;
function replace(answer) {
  shown.checkpoints = shown.checkpoints.map((other) => (nameOf(other) === nameOf(answer) ? answer : other)); // the stream of a job that has ended sends nothing more
  showCheckpoints(shown);
}
const newer = (one) => shown.checkpoints.filter((other) => other.state === "committed" && other.step > one.step).length;

function pin(one) {
  const { keep } = shown.job.spec.checkpoint;
  return {
    title: `Pin the checkpoint of step ${whole(one.step)}`,
    confirm: "Pin",
    send: async () => replace(await put(`${path(one)}/pin`)),
    words: () =>
      `The job keeps its newest ${plural(keep, "checkpoint")} and deletes older ones after each commit. This one stays until it is unpinned, and takes ${bytes(one.bytes)} of storage. Training is not touched.`,
  };
}

function unpin(one) {
  const { keep } = shown.job.spec.checkpoint;
  const later =
    newer(one) < keep
      ? `It is among the newest ${keep}, so it stays for now.`
      : `Of the newer ones the job keeps ${keep}, and deletes this one after its next commit.`;
  return {
    title: `Unpin the checkpoint of step ${whole(one.step)}`,
    confirm: "Unpin",
    send: async () => replace(await remove(`${path(one)}/pin`)),
    words: () => (ENDED.has(shown.job.status.state) ? "The job has ended, so nothing deletes it." : later),
  };
}

// The dialog stays open and says how far it is; it closes only if every byte is as it was written.
function verify(one) {
  return {
    title: `Verify the checkpoint of step ${whole(one.step)}`,
    confirm: "Verify",
    words: () =>
      `The server reads all ${bytes(one.bytes)} of it once, and compares lengths and checksums with those that were written. Training is not touched; the storage is read beside it. A checkpoint that is found damaged is not used any more by later attempts.`,
    send: async () => {
      let found;
      do {
        found = await post(`${path(one)}/verify?wait=1`);
        $("dialog-words").textContent = `${bytes(found.bytes_read)} of ${bytes(found.bytes)} read.`;
      } while (found.state === "running");
      if (found.state === "damaged") replace({ ...one, state: "damaged", message: found.message });
      if (found.state !== "whole") throw new Error(`${found.state}: ${found.message}`);
      replace({ ...one, message: `verified: whole, ${bytes(found.bytes_read)} read in ${seconds(found.seconds)}` });
    },
  };
}

function deletion(one) {
  const ended = ENDED.has(shown.job.status.state);
  const good = shown.checkpoints
    .filter((other) => other.state === "committed" && other !== one)
    .map((other) => other.step);
  const older = good.filter((step) => step <= one.step);
  const newest = one.state === "committed" && !good.some((step) => step > one.step);
  const left = good.length
    ? `${plural(good.length, "other checkpoint")} of the job ${good.length === 1 ? "is" : "are"} kept.`
    : "The job then has no checkpoint: nothing of its model is left.";
  const why = one.pinned
    ? "It is pinned, so the service refuses this: unpin it first."
    : newest && !ended
      ? `It is the newest one of a job that has not ended, so the service refuses this: the job would resume from it${older.length ? ", not from the ones before" : ""}. Wait for the next one, or cancel the job.`
      : `It frees ${bytes(one.bytes)} of storage and cannot be undone. ${left}${ended ? "" : " Training is not touched."}`;
  return {
    title: `Delete the checkpoint of step ${whole(one.step)}`,
    confirm: "Delete the checkpoint",
    words: () => why,
    send: async () => replace(await remove(path(one))),
  };
}
