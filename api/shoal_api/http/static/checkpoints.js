// The durable checkpoints of a job, newest first, with what can be done about each.
import { $, element, fill, row } from "./dom.js";
import { ask } from "./dialog.js";
import { jobPath, request } from "./api.js";
import { ENDED } from "./states.js";
import { bytes, moment, plural, seconds, whole } from "./format.js";

const COLOURS = { committed: "done", damaged: "bad", failed: "bad", deleted: "dim" };
let shown = null;

// Of the state of the page: its job, and its checkpoints.
export function showCheckpoints(state) {
  shown = state;
  const { checkpoints } = state;
  $("unsaved").hidden = checkpoints.length > 0;
  fill("checkpoints", [...checkpoints].reverse().map((one) => row([whole(one.step), element("span", one.pinned ? `${one.state}, pinned` : one.state, { class: COLOURS[one.state] }), moment(one.committed_at), bytes(one.bytes), seconds(one.seconds),
    seconds(one.stall_s), one.world_size || "–", element("code", one.url), buttons(one)], { title: one.message })));
}

function buttons(one) {
  if (one.state !== "committed") return one.pinned ? button("Unpin", one, () => ask(unpin(one))) : "";
  return element("span", [one.pinned ? button("Unpin", one, () => ask(unpin(one))) : button("Pin", one, () => ask(pin(one))), button("Export", one, () => ask(exportIt(one)))], { class: "controls" });
}

const button = (words, one, click) => element("button", words, { type: "button", "data-checkpoint": `${words.toLowerCase()}-${one.step}`, "aria-label": `${words} the checkpoint of step ${one.step}`, click });
const nameOf = (one) => `step-${String(one.step).padStart(12, "0")}-a${one.attempt}-g${one.generation}`;
async function send(method, one) {
  const answer = await request(`${jobPath(shown.job.id)}/checkpoints/${encodeURIComponent(nameOf(one))}/pin`, { method });
  shown.checkpoints = shown.checkpoints.map((other) => nameOf(other) === nameOf(answer) ? answer : other);  // the stream of a job that has ended sends nothing more
  showCheckpoints(shown);
}
const newer = (one) => shown.checkpoints.filter((other) => other.state === "committed" && other.step > one.step).length;

function pin(one) {
  const { keep } = shown.job.spec.checkpoint;
  return { title: `Pin the checkpoint of step ${whole(one.step)}`, confirm: "Pin", send: () => send("PUT", one),
    words: async () => `The job keeps its newest ${plural(keep, "checkpoint")} and deletes older ones after each commit. This one stays until it is unpinned, and takes ${bytes(one.bytes)} of storage. Training is not touched.` };
}

function unpin(one) {
  const { keep } = shown.job.spec.checkpoint;
  const later = newer(one) < keep ? `It is among the newest ${keep}, so it stays for now.` : `Of the newer ones the job keeps ${keep}, and deletes this one after its next commit.`;
  return { title: `Unpin the checkpoint of step ${whole(one.step)}`, confirm: "Unpin", send: () => send("DELETE", one),
    words: async () => ENDED.has(shown.job.status.state) ? "The job has ended, so nothing deletes it." : later };
}

function exportIt(one) {
  const command = `shoal export ${shown.job.id} OUT --step ${one.step}`;
  return { title: `Export the checkpoint of step ${whole(one.step)}`, confirm: "Copy the command", send: () => navigator.clipboard.writeText(command),
    words: async () => `A page cannot write a directory of your machine, so this copies a command: ${command}. It verifies the checkpoint, reads its model, and writes it to the directory OUT as safetensors and config.json. The checkpoint and the job are not touched.` };
}
