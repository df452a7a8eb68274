// What the job is and does, in words and numbers.
import { $, element, fillFacts } from "./dom.js";
import { moment, number, percent, plural, progressOf, reported, seconds, steps, unitOf, whole } from "./format.js";
import { badge, ENDED } from "./states.js";

export function showHead(job, clusters) {
  const status = job.status;
  document.title = `${job.name}: ${status.state}`;
  $("title").replaceChildren(`${job.name} `, badge(status.state, job.queue?.position));
  $("progress").value = progressOf(status) ?? 0;
  $("message").textContent = [status.message, status.note].filter(Boolean).join(" ");
  const unit = unitOf(job), say = (text) => reported(job, text), isOver = ENDED.has(status.state);
  fillFacts("facts", [...queue(job.queue), ...where(job, clusters), ...command(job.spec), ["Step", say(steps(status))], ["Loss", say(number(status.loss))], ...known([["Validation loss", number(status.val_loss)]]),
    ...(isOver ? [] : [[`${unit[0].toUpperCase()}${unit.slice(1)}/s`, say(number(status.tokens_per_s))], ["Workers", `${status.workers} of ${status.desired_workers} granted`], ...heldBack(status.held_back), ["Remaining", say(seconds(status.eta_s))]]),
    ...known([["Goodput", status.goodput ? percent(status.goodput.ratio) : "–"]]), ...(status.incidents ? [["Incidents", `${whole(status.incidents)}, ${lost(job)}`]] : []), ...origin(job.spec), ...best(job)]);
  fillFacts("more-facts", known([["Id", job.id], ["User", job.spec.user], ["Project", job.spec.project], ["Priority", job.spec.priority], ["Submitted", moment(job.created_at)], ["Ended", moment(job.ended_at)],
    ...Object.entries(job.spec.labels || {}).map(([key, value]) => [`Label ${key}`, value]), ["Layout", status.layout || "–"], ["Parameters", number(status.num_parameters)], ["Validation bits/byte", number(status.val_bits_per_byte)],
    ["Snapshots", snapshots(status)], ["A dead worker", workerLoss(status)], ["A lost node costs", nodeLoss(status)], ["Checkpoint at step", whole(status.checkpoint_step)],
    ["Attempt, generation", status.attempt ? `${status.attempt}, ${status.generation}` : "–"]]));
  $("failure").hidden = !status.failure;
  if (status.failure) $("failure").textContent = `ranks ${status.failure.ranks.join(", ")}${status.failure.step || !job.spec.script ? ` at step ${status.failure.step}` : ""}\n${status.failure.traceback || status.failure.message}`;
}

// A program as it is typed. Words with other characters than those of names and numbers are quoted, as a shell needs it.
const quoted = (word) => /^[\w@%+=:,.\/-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\"'\"'")}'`;
const command = ({ script, loop }) => {
  const program = script || loop;
  if (!program) return [];
  const words = [...(program.module ? ["-m", program.module] : [program.file]), ...program.args].map(quoted).join(" ");
  return [["Command", element("code", words, { title: script ? `as by ${script.launcher}` : "in place" })]];
};
const lost = (job) => reported(job, steps(job.status)) === "not reported" ? "lost steps not reported" : `${plural(job.status.steps_lost, "step")} lost`;
// Those that have a value: a row of dashes says nothing.
const known = (pairs) => pairs.filter(([, value]) => value !== "–");
const queue = (place) => !place ? [] : [["Position in the queue", place.position], ["Expected start", place.expected_at === null ? "not known" : moment(place.expected_at)],
  ["Who holds what it waits for", place.holders.join(", ") || "–"]];
// Where it runs, if there is a choice: with what the spec wants, if that is another one.
function where({ spec, status }, clusters) {
  if (clusters.length < 2) return [];
  const wanted = spec.worker.cluster, away = clusters.find((one) => one.name === status.cluster && !one.connected);
  const goesTo = wanted === "any" || wanted === status.cluster ? "" : status.cluster ? `, to ${wanted}` : wanted;
  return [["Cluster", `${status.cluster || (wanted === "any" ? "any" : "")}${goesTo}${away ? " (away)" : ""}`]];
}
// What it began with: the checkpoint of another job, or a file of weights.
const origin = ({ continue_from: from, init_from: file }) => from ? [["Continues", element("a", Number.isInteger(from.step) ? `${from.job} after step ${whole(from.step)}` : `the files of ${from.job}`, { href: `/jobs/${encodeURIComponent(from.job)}` })]] : file ? [["Begins with", file]] : [];
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
