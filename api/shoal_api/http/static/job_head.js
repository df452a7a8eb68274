// What the job is and does, in words and numbers.
import { $, element, fillFacts } from "./dom.js";
import { moment, number, percent, progressOf, seconds, steps, whole } from "./format.js";
import { badge } from "./states.js";

export function showHead(job) {
  const status = job.status;
  document.title = `${job.name}: ${status.state}`;
  $("title").replaceChildren(`${job.name} `, badge(status.state, job.queue?.position));
  $("progress").value = progressOf(status) ?? 0;
  $("message").textContent = [status.message, status.note].filter(Boolean).join(" ");
  fillFacts("facts", [["Id", job.id], ["User", job.spec.user], ["Project", job.spec.project], ["Priority", job.spec.priority], ...queue(job.queue), ["Step", steps(status)],
    ["Loss", number(status.loss)], ["Validation loss", number(status.val_loss)], ["Validation bits/byte", number(status.val_bits_per_byte)],
    ["Tokens/s", number(status.tokens_per_s)], ["Workers", `${status.workers} of ${status.desired_workers} granted`], ...heldBack(status.held_back), ["Layout", status.layout || "–"], ["Remaining", seconds(status.eta_s)],
    ["Incidents", whole(status.incidents)], ["Steps lost", whole(status.steps_lost)], ["Goodput", status.goodput ? percent(status.goodput.ratio) : "–"],
    ["Snapshots", snapshots(status)], ["A dead worker", workerLoss(status)], ["A lost node costs", nodeLoss(status)], ["Checkpoint at step", whole(status.checkpoint_step)], ["Parameters", number(status.num_parameters)],
    ["Attempt, generation", `${status.attempt}, ${status.generation}`], ...origin(job.spec), ...best(job), ["Submitted", moment(job.created_at)], ...(job.ended_at ? [["Ended", moment(job.ended_at)]] : []),
    ...Object.entries(job.spec.labels || {}).map(([key, value]) => [`Label ${key}`, value])]);
  $("failure").hidden = !status.failure;
  if (status.failure) $("failure").textContent = `ranks ${status.failure.ranks.join(", ")} at step ${status.failure.step}\n${status.failure.traceback || status.failure.message}`;
}

const queue = (place) => !place ? [] : [["Position in the queue", place.position], ["Expected start", place.expected_at === null ? "not known" : moment(place.expected_at)],
  ["Who holds what it waits for", place.holders.join(", ") || "–"]];
// What it began with: the checkpoint of another job, or a file of weights.
const origin = ({ continue_from: from, init_from: file }) => from ? [["Continues", element("a", `${from.job} after step ${whole(from.step)}`, { href: `/jobs/${encodeURIComponent(from.job)}` })]] : file ? [["Begins with", file]] : [];
function best({ spec, status: { best: standing } }) {
  if (!standing?.best?.length) return [];
  const [first] = standing.best, kept = standing.keep ? `, its checkpoint is kept (the best ${whole(standing.keep)})` : "";
  const patience = spec.validation.patience === null ? "" : `; ${standing.num_since} of ${spec.validation.patience} validations without an improvement`;
  return [["Best validation", `${standing.metric} ${number(first.value)} after step ${whole(first.step)}${kept}${patience}`]];
}
const heldBack = (answer) => !answer ? [] : [["Why not more workers", answer.reason]];
const snapshots = (status) => status.snapshot_every_steps === null ? "–"
  : `every ${status.snapshot_every_steps === 1 ? "step" : `${number(status.snapshot_every_steps)} steps`}, ${percent(status.snapshot_share)}`;
const workerLoss = ({ worker_loss: bound }) => !bound ? "–"
  : `repeats ${bound.at_most === null ? "the steps since the last checkpoint" : `at most ${bound.at_most} ${bound.at_most === 1 ? "step" : "steps"}`}${bound.reason ? `: ${bound.reason}` : ""}`;
const nodeLoss = ({ node_loss: bound }) => !bound ? "–"
  : `${bound.at_most === null ? "since the last checkpoint" : `at most ${bound.at_most} steps`}, now ${bound.now} (${bound.protection.replaceAll("_", " ")})`;
