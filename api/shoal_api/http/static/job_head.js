// What the job is and does, in words and numbers.
import { $, element, fill, fillFacts, link, showText } from "./dom.js";
import { jobPath, request, stepPage } from "./api.js";
import {
  joined,
  moment,
  number,
  percent,
  plural,
  progressOf,
  reported,
  seconds,
  steps,
  unitOf,
  whole,
  words,
} from "./format.js";
import { badge, ENDED } from "./states.js";
import { holders } from "./holders.js";
import { noteState } from "./notify.js";
import { sentence } from "./job_sentence.js";
import { wayOut } from "./ways_out.js";

const LAST_LINES = 12;

export function titled(job) {
  document.title = `${job.name}: ${job.status.state}`;
  noteState(job);
}

export function showHead(job, shown) {
  const { clusters } = shown,
    status = job.status;
  titled(job);
  fill("title", [`${job.name} `, badge(status.state, job.queue?.position)]);
  $("sentence").textContent = sentence(job);
  $("progress").value = progressOf(status) ?? 0;
  $("progress").hidden = progressOf(status) === null;
  const reason = job.queue && job.queue.reason !== status.message ? job.queue.reason : "";
  showText("message", joined([status.message, status.note, reason], " "));
  $("message").className = status.state === "FAILED" ? "bad" : "dim";
  showText("way-out", wayOut(status));
  $("incidents-card").hidden = !status.attempt;
  fillFacts("vital", status.state === "QUEUED" ? queue(job) : vital(job));
  fillFacts("facts", [
    where(job, clusters),
    command(job.spec),
    status.held_back && ["Why not more workers", status.held_back.reason],
    ...known([["Validation loss", number(status.val_loss)]]),
    status.incidents ? ["Incidents", `${whole(status.incidents)}, ${lost(job)}`] : null,
    ...status.alerts.map((alert) => [`Alert ${alert.condition}`, alertWords(alert)]),
    origin(job.spec),
    best(job),
  ]);
  fillFacts(
    "more-facts",
    known([
      ["Id", job.id],
      ["User", job.spec.user],
      ["Project", job.spec.project],
      ["Priority", job.spec.priority],
      ["Submitted", moment(job.created_at)],
      ["Ended", moment(job.ended_at)],
      ...Object.entries(job.spec.labels || {}).map(([key, value]) => [`Label ${key}`, value]),
      ["Layout", status.layout || "–"],
      ["Why this layout", status.layout_reason || "–"],
      ["Parameters", number(status.num_parameters)],
      ["Validation bits/byte", number(status.val_bits_per_byte)],
      ["Snapshots", snapshots(status)],
      ["A dead worker", workerLoss(status)],
      ["A lost node costs", nodeLoss(status)],
      ["Checkpoint at step", whole(status.checkpoint_step)],
      ["Attempt, generation", status.attempt ? `${status.attempt}, ${status.generation}` : "–"],
    ]),
  );
  showFailure(job);
}

const alertWords = ({ holds, step }) =>
  step === null
    ? "not yet"
    : element("span", `${holds ? "since" : "not now, last at"} step ${whole(step)}`, { class: holds ? "warn" : "" });

// The error is in the message. Here is what the rank that failed printed last, and where in its code it was.
function showFailure({ id, spec, status: { attempt, failure } }) {
  $("failure").hidden = !failure;
  if (!failure || $("failure").dataset.of === `${attempt}`) return;
  $("failure").dataset.of = `${attempt}`;
  const who = `${failure.ranks.length > 1 ? "Ranks" : "Rank"} ${failure.ranks.join(", ")}${failure.step || !spec.script ? `, step ${failure.step}` : ""}`;
  $("traceback").hidden = !failure.traceback;
  $("traceback").firstChild.textContent = `Traceback: ${who}`;
  $("traceback").lastChild.textContent = failure.traceback;
  const [rank] = failure.ranks,
    write = (lines) => {
      $("last-lines").textContent = `${who}\n${lines.map(({ text }) => text).join("\n")}`;
    };
  write([]);
  if (rank !== undefined)
    request(`${jobPath(id)}/logs?rank=${rank}&tail=${LAST_LINES}`).then(
      ({ items }) => write(items),
      () => {},
    );
}

// What matters now: of a job that trains its speed and its end, of one that has ended what came out.
function vital(job) {
  const { status } = job,
    unit = unitOf(job),
    say = (text) => reported(job, text),
    goodput = known([["Goodput", status.goodput ? percent(status.goodput.ratio) : "–"]]);
  const common = [
    ["Step", say(steps(status))],
    ["Loss", say(number(status.loss))],
  ];
  if (ENDED.has(status.state))
    return [
      ...known(common),
      ...goodput,
      ...known([
        ["Took", job.started_at && job.ended_at ? seconds(job.ended_at - job.started_at) : "–"],
        ["Newest checkpoint", status.checkpoint_step === null ? "–" : `step ${whole(status.checkpoint_step)}`],
      ]),
    ];
  return [
    ...common,
    [`${unit[0].toUpperCase()}${unit.slice(1)}/s`, say(number(status.tokens_per_s))],
    ["Workers", `${status.workers} of ${status.desired_workers} granted`],
    ["Remaining", say(seconds(status.eta_s))],
    ...goodput,
  ];
}

// A program as it is typed. Words with other characters than those of names and numbers are quoted, as a shell needs it.
const quoted = (word) => (/^[\w@%+=:,.\/-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\"'\"'")}'`);
const command = ({ script, loop }) => {
  const program = script || loop;
  if (!program) return null;
  const typed = [...(program.module ? ["-m", program.module] : [program.file]), ...program.args].map(quoted).join(" ");
  return ["Command", element("code", typed, { title: script ? `as by ${script.launcher}` : "in place" })];
};
const lost = (job) =>
  reported(job, steps(job.status)) === "not reported"
    ? "lost steps not reported"
    : `${plural(job.status.steps_lost, "step")} lost`;
// Those that have a value: a row of dashes says nothing.
const known = (pairs) => pairs.filter(([, value]) => value !== "–");
function queue({ queue: place, spec, created_at: created }) {
  const wants = `${plural(spec.elasticity.min_workers, "worker")}${spec.elasticity.max_workers > spec.elasticity.min_workers ? `, at most ${spec.elasticity.max_workers}` : ""}`;
  return [
    place && ["Position in the queue", place.position],
    place && ["Expected start", place.expected_at === null ? "not known" : moment(place.expected_at)],
    ["Waiting since", moment(created)],
    ["Wants at least", wants],
    ["Priority", spec.priority],
    place?.holders.length ? ["Waiting for", element("span", holders(place.holders))] : null,
  ];
}
// Where it runs, if there is a choice: with what the spec wants, if that is another one.
function where({ spec, status }, clusters) {
  if (clusters.length < 2) return null;
  const wanted = spec.worker.cluster,
    away = clusters.find((one) => one.name === status.cluster && !one.connected);
  const goesTo = wanted === "any" || wanted === status.cluster ? "" : status.cluster ? `, to ${wanted}` : wanted;
  return ["Cluster", `${status.cluster || (wanted === "any" ? "any" : "")}${goesTo}${away ? " (away)" : ""}`];
}
// What it began with: the checkpoint of another job, or a file of weights.
function origin({ continue_from: from, init_from: file }) {
  if (!from) return file ? ["Begins with", file] : null;
  const text = Number.isInteger(from.step) ? `${from.job} after step ${whole(from.step)}` : `the files of ${from.job}`;
  return ["Continues", link(text, stepPage(from.job, from.step))];
}
function best({ spec, status: { best: standing } }) {
  if (!standing?.best?.length) return null;
  const [first] = standing.best,
    kept = standing.keep ? `, its checkpoint is kept (the best ${whole(standing.keep)})` : "";
  const patience =
    spec.validation.patience === null
      ? ""
      : `; ${standing.num_since} of ${spec.validation.patience} validations without an improvement`;
  return [
    "Best validation",
    `${standing.metric} ${number(first.value)} after step ${whole(first.step)}${kept}${patience}`,
  ];
}
const snapshots = (status) =>
  status.snapshot_every_steps === null
    ? "–"
    : `every ${status.snapshot_every_steps === 1 ? "step" : `${number(status.snapshot_every_steps)} steps`}, ${percent(status.snapshot_share)}`;
const repeats = ({ at_most: most }) =>
  `repeats ${most === null ? "the steps since the last checkpoint" : `at most ${plural(most, "step")}`}`;
const workerLoss = ({ worker_loss: bound }) =>
  bound ? repeats(bound) + (bound.reason ? `: ${bound.reason}` : "") : "–";
const nodeLoss = ({ node_loss: bound }) =>
  bound ? `${repeats(bound)}, ${whole(bound.now)} now (${words(bound.protection)})` : "–";
