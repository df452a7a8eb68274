// The buttons of a job. Each says what will happen and what it costs before it does anything.
import { $, button, fillEach } from "./dom.js";
import { ask, choice, field, refresh } from "./dialog.js";
import { jobPath, patch, post, remove } from "./api.js";
import { number, plural, seconds, whole } from "./format.js";
import { ENDED } from "./states.js";
import { about } from "./nodes.js";
import { exporting } from "./exporting.js";
import { alerting } from "./notify.js";
import { continued, form, newJobWords, submitNew, submittable } from "./new_job.js";

let shown = null;

export function showActions(state) {
  const { state: now, workers } = state.job.status;
  shown = state;
  if ($("actions").dataset.about !== `${now} ${workers}`) refresh();
  $("actions").dataset.about = `${now} ${workers}`;
  const usable = Object.keys(ACTIONS).filter((name) => ACTIONS[name].when(now));
  if ($("actions").dataset.usable === usable.join()) return;
  $("actions").dataset.usable = usable.join();
  fillEach("actions", usable, (name) =>
    button(ACTIONS[name].title, () => open(name), {
      class: HARMFUL.has(name) ? "danger" : ENDED.has(now) && name === usable[0] ? "primary" : "",
      "data-action": name,
    }),
  );
}

const HARMFUL = new Set(["cancel", "delete"]);
const RUNNING = new Set(["STARTING", "RUNNING", "RECOVERING", "RESIZING", "WAITING"]);
const isScript = () => Boolean(shown.job.spec.script);
const goes = (now) => !ENDED.has(now),
  hasEnded = (now) => ENDED.has(now),
  isPaused = (now) => now === "PAUSED" || now === "PAUSING";
// `when`: the states in which a job has the button. The buttons have this order.
const ACTIONS = {
  scale: {
    when: goes,
    title: "Scale",
    input: ({ spec }) => [field("Workers, at most", { type: "number", min: 1, value: spec.elasticity.max_workers })],
    words: scaleWords,
    send: (value) =>
      change({
        elasticity: {
          max_workers: Number(value),
          ...(Number(value) < shown.job.spec.elasticity.min_workers ? { min_workers: Number(value) } : {}),
        },
      }),
  },
  relayout: {
    when: (now) => goes(now) && !isScript(),
    title: "Change layout",
    input: () => [field("auto, or degrees such as tp=2 pp=1", { value: "auto" })],
    words: relayoutWords,
    send: (value) => change({ parallelism: degrees(value) }),
  },
  priority: {
    when: goes,
    title: "Priority",
    confirm: "Set priority",
    input: ({ spec }) => [
      field("Priority, -1000 to 1000", { type: "number", min: -1000, max: 1000, value: spec.priority }),
    ],
    words: (value) =>
      `Priority ${shown.job.spec.priority} becomes ${value}. Jobs of higher priority get workers first, also those of running jobs of lower priority, which then save and wait. Training itself is not touched.`,
    send: (value) => change({ priority: Number(value) }),
  },
  move: {
    when: (now) => goes(now) && shown.clusters.length > 1,
    title: "Move",
    input: ({ spec }) => [choice("Cluster", destinations(spec.worker.cluster))],
    words: moveWords,
    send: (value) => act("move", { to: value }),
  },
  pause: {
    when: (now) => goes(now) && !isPaused(now),
    title: "Pause",
    words: () =>
      isScript()
        ? `${stops()} Its ${plural(shown.job.status.workers, "worker")} end and their resources are free. Resume puts it back into the queue.`
        : `The job saves a checkpoint after its current step${lastSave()}, then its ${plural(shown.job.status.workers, "worker")} end and their resources are free. No step is lost. Resume puts it back into the queue.`,
    send: () => act("pause"),
  },
  resume: {
    when: isPaused,
    title: "Resume",
    words: () =>
      isScript()
        ? "The job returns to the queue. Its script is started again, as soon as there are workers for it."
        : `The job returns to the queue and goes on from its checkpoint of step ${whole(shown.job.status.checkpoint_step ?? 0)}, as soon as there are workers for it.`,
    send: () => act("resume"),
  },
  profile: {
    when: (now) => RUNNING.has(now) && !isScript(),
    title: "Profile",
    input: () => [
      field("Rank", { type: "number", min: 0, value: 0 }),
      field("Steps", { id: "profile-steps", type: "number", min: 1, max: 20, value: 3 }),
    ],
    words: (value) =>
      `From the next step boundary of rank ${value} on, torch's profiler records what it does: ${plural(shown.job.status.workers, "worker")} train on, and no number changes. The profiled steps are slower, and all ranks wait for this one; starting and stopping takes a moment once. The trace is kept beside the checkpoints, the newest 8 of a job.`,
    send: (value) => act("profiles", { rank: Number(value), steps: Number($("profile-steps").value) }),
  },
  alerts: { when: goes, title: "Alerts", dialog: () => alerting(shown.job, (alerts) => change({ alerts })) },
  retry: {
    when: (now) => now === "FAILED",
    title: "Retry",
    words: () =>
      `The same job returns to the queue and ${goesOn()}, with its whole retry budget. If the cause is still there, it fails again.`,
    send: () => reopen("retry"),
  },
  extend: {
    when: (now) => hasEnded(now) && !isScript(),
    title: "Extend",
    input: ({ status }) => [
      field("Total steps", {
        type: "number",
        min: status.step + 1,
        value: 2 * Math.max(status.step, status.total_steps ?? 0) || 100,
      }),
    ],
    words: extendWords,
    send: (value) => reopen("extend", { steps: Number(value) }),
  },
  continue: {
    when: (now) => hasEnded(now) && !isScript() && committed(),
    title: "Continue in a new job",
    confirm: "Submit a new job",
    input: () => form(continued(shown.job, committed().step)),
    words: (text) => newJobWords(text, submittable(shown.job.spec), "A new job is submitted."),
    send: submitNew,
  },
  again: {
    when: hasEnded,
    title: "Run again",
    confirm: "Submit a new job",
    input: ({ spec }) => form(submittable(spec)),
    words: (text) =>
      newJobWords(
        text,
        submittable(shown.job.spec),
        "A new job with the same spec is submitted, and its page is shown.",
      ),
    send: submitNew,
  },
  export: {
    when: (now) => hasEnded(now) && !isScript(),
    title: "Export",
    dialog: () => exporting(shown.job, wholeOnes(), shown.checkpoints.length),
  },
  rename: {
    when: () => true,
    title: "Rename",
    input: ({ name }) => [field("New name", { value: name, spellcheck: "false" })],
    words: "Its id and the addresses of its pages stay. Training is not touched.",
    send: async (value) => {
      await change({ name: value });
      location.reload();
    },
  },
  cancel: {
    when: goes,
    title: "Cancel",
    confirm: "Cancel the job",
    words: () =>
      isScript()
        ? `The job ends and cannot go on. ${stops()} This cannot be undone.`
        : `The job ends at step ${whole(shown.job.status.step)} and cannot go on. ${kept()} This cannot be undone.`,
    send: () => act("cancel"),
  },
  delete: {
    when: hasEnded,
    title: "Delete",
    confirm: "Delete the job",
    input: () => [
      choice("Its checkpoints and profiles", [
        new Option("are deleted too", "true"),
        new Option("stay in the storage", "false"),
      ]),
    ],
    words: deleteWords,
    send: async (value) => {
      await remove(`${jobPath(shown.job.id)}?checkpoints=${value}`);
      location.href = "/";
    },
  },
};

// What becomes of the processes of a script whose group ends.
const stops = () =>
  `Each process of the script gets SIGTERM, and SIGKILL ${seconds(shown.job.spec.script.grace_s)} later if it has not ended. A script that is started again goes on from its own checkpoint.`;

const open = (name) =>
  ask(ACTIONS[name].dialog?.() ?? { ...ACTIONS[name], input: ACTIONS[name].input?.(shown.job) ?? [] });

const change = (body) => patch(jobPath(shown.job.id), body);
const act = (verb, body) => post(`${jobPath(shown.job.id)}/${verb}`, body);

// The stream of a job that has ended is over, so the page is loaded again.
const reopen = (verb, body) => act(verb, body).then(() => location.reload());

// What the planner says. It sets the number of workers itself, and a deadline or a code archive means nothing to it.
function planned({ elasticity, code, finish_by: deadline, ...spec }, workers) {
  return post("/v1/plans", { spec, workers, top: 1 });
}

async function extendWords(value) {
  const steps = Number(value),
    { step } = shown.job.status;
  if (!Number.isInteger(steps) || steps <= step) return `More than the ${plural(step, "step")} that are done.`;
  return `The same job returns to the queue and ${goesOn()} to step ${whole(steps)}. Its learning rate follows the schedule to the new end, unless schedule.steps says otherwise.`;
}

async function deleteWords(value) {
  const pinned = shown.checkpoints.filter((one) => one.pinned).length;
  const files =
    value === "false"
      ? "Its files stay in the storage, and nothing lists them any more."
      : pinned
        ? `${plural(pinned, "pinned checkpoint")} ${pinned === 1 ? "stays" : "stay"} in the storage.`
        : "Nothing of its model is left.";
  return `The job is deleted with its log, events and curves. ${files} This cannot be undone.`;
}

const goesOn = () => {
  if (isScript()) return "its script is started again";
  const last = committed();
  return last
    ? `goes on from its checkpoint of step ${whole(last.step)}`
    : "begins with its first step: it has no checkpoint";
};
const destinations = (wanted) =>
  ["any", ...shown.clusters.map((one) => one.name)].map(
    (name) => new Option(name, name, name === wanted, name === wanted),
  );

async function moveWords(value) {
  const { status, spec } = shown.job,
    there = shown.clusters.find((one) => one.name === value);
  if (value === spec.worker.cluster) return "That is what the spec says now.";
  if (value === "any")
    return status.workers
      ? "The scheduler may choose the cluster of the next attempt. This one goes on where it is."
      : "The scheduler chooses the cluster.";
  if (value === status.cluster && status.workers) return "It runs there, and stays.";
  if (isScript())
    return `${status.workers ? `${stops()} ` : ""}The job waits in the queue until ${value} has room for ${plural(spec.elasticity.min_workers, "worker")}. ${value}: ${about(there)}.`;
  const leaves = status.workers
    ? `The job saves a checkpoint after its current step${lastSave()} and ends its ${plural(status.workers, "worker")} in ${status.cluster || "its cluster"}. `
    : "";
  return `${leaves}It waits in the queue until ${value} has room for ${plural(spec.elasticity.min_workers, "worker")}, and goes on there without losing a step. ${value}: ${about(there)}.`;
}

async function scaleWords(value) {
  const workers = Number(value),
    { status, spec } = shown.job;
  if (!Number.isInteger(workers) || workers < 1) return "A number of workers, 1 or more.";
  if (workers === spec.elasticity.max_workers) return "That is the present number.";
  if (isScript())
    return `At most ${plural(workers, "worker")} instead of ${spec.elasticity.max_workers}. ${status.workers ? stops() : ""}`;
  const found = await planned(spec, workers);
  const idle = found.choice.num_idle ? ` ${plural(found.choice.num_idle, "worker")} would be idle.` : "";
  const less = workers < spec.elasticity.min_workers ? ` min_workers becomes ${workers}, too.` : "";
  const best = found.ranking.predictions[0];
  return (
    `At most ${plural(workers, "worker")} instead of ${spec.elasticity.max_workers}, as ${found.choice.name}${best ? `: predicted ${seconds(best.step_s)} per step, ${number(best.tokens_per_s, 3)} tokens/s` : ""}.${idle}${less} ` +
    `The group ${status.workers ? "switches at its next step boundary; no step is lost" : "forms so when it starts"}${lastSwitch()}. If the cluster has fewer free, the job gets what there is.`
  );
}

async function relayoutWords(value) {
  const parallelism = degrees(value),
    { status, spec } = shown.job;
  const workers = status.workers || spec.elasticity.max_workers;
  const found = await planned({ ...spec, parallelism }, workers);
  return `${status.layout || "The group"} becomes ${found.choice.name} with ${plural(workers, "worker")}. ${found.choice.reason} The state is resharded in memory at the next step boundary; no step is lost${lastSwitch()}.`;
}

function degrees(text) {
  if (text.trim() === "auto") return "auto";
  const found = Object.fromEntries(
    text
      .trim()
      .split(/[\s,]+/)
      .map((pair) => pair.split("="))
      .map(([name, degree]) => [name, Number(degree)]),
  );
  if (Object.values(found).some((degree) => !Number.isInteger(degree) || degree < 1))
    throw new Error("Use auto, or degrees such as: tp=2 pp=1");
  return found;
}

// How long the last planned switch took, from its events.
function lastSwitch() {
  const begun = shown.events.findLast((event) => event.type === "generation.switching");
  const formed = begun && shown.events.find((event) => event.type === "generation.formed" && event.at >= begun.at);
  return formed ? ` (the last switch took ${seconds(formed.at - begun.at)})` : "";
}

const wholeOnes = () => shown.checkpoints.filter((one) => one.state === "committed").reverse();
const committed = () => wholeOnes()[0];
const lastSave = () => {
  const last = committed();
  return last ? ` (the last one took ${seconds(last.seconds)})` : "";
};
function kept() {
  const last = committed();
  if (!last) return "It has no checkpoint: nothing of it is kept.";
  const later = shown.job.status.step - last.step;
  return `Its checkpoint of step ${whole(last.step)} is kept${later > 0 ? `; ${plural(later, "step")} after it ${later === 1 ? "is" : "are"} lost` : ""}.`;
}
