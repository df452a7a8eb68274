// A new job from one that there is: the form with its spec, and what the form changes of it, key by key, before it is submitted.
import { element } from "./dom.js";
import { jobPage, submitJob, validated } from "./api.js";
import { plural, whole } from "./format.js";
import { differences } from "./differences.js";

export const form = (spec) => [
  element("textarea", yaml(spec), {
    id: "dialog-value",
    rows: 14,
    spellcheck: "false",
    "aria-label": "Spec of the new job in YAML",
  }),
];
export const submitNew = async (text) => {
  location.href = jobPage((await submitJob(text)).id);
};

// `same`: the words if the form changes nothing.
export async function newJobWords(text, before, same) {
  const found = await validated(text);
  if (!found.valid) throw new Error(found.words);
  const changes = differences(before, submittable(found.spec)),
    rest = `${origin(found.spec)} This job is not changed.`;
  return changes.length
    ? `A new job is submitted with ${plural(changes.length, "change")}. ${rest}\n${changes.map(([path, from, to]) => `${path}: ${from} → ${to}`).join("\n")}`
    : `${same} ${rest}`;
}

// What its training begins with.
function origin({ continue_from: from, init_from: file }) {
  if (from)
    return `It starts from ${Number.isInteger(from.step) ? `the checkpoint of ${from.job} after step ${whole(from.step)}` : `a copy of the files of ${from.job}`}.`;
  return file ? `It starts with the weights of ${file}.` : "It starts at step 0.";
}

// A deadline is that of the first run, and where the checkpoint of another job lies is found anew.
export function submittable(spec) {
  const { finish_by: deadline, continue_from: from, ...rest } = spec;
  return { ...rest, ...(from ? { continue_from: { job: from.job, step: from.step } } : {}) };
}

// The spec of a job that goes on from a checkpoint of this one.
export function continued({ id, spec, status }, step) {
  const { init_from: weights, ...rest } = submittable(spec);
  return {
    ...rest,
    continue_from: { job: id, step },
    stop: { ...spec.stop, ...(spec.stop.steps ? { steps: Math.max(2 * step, status.total_steps ?? 0) } : {}) },
  };
}

// A document as YAML, as people write specs: a line for each key, lists in brackets, texts in quotes.
function yaml(value, indent = "") {
  return Object.entries(value)
    .map(([key, inner]) =>
      isNested(inner)
        ? `${indent}${named(key)}:\n${yaml(inner, `${indent}  `)}`
        : `${indent}${named(key)}: ${flow(inner)}\n`,
    )
    .join("");
}

const isNested = (value) =>
  value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length > 0;
const named = (key) =>
  /^[A-Za-z_][\w.-]*$/.test(key) && !/^(y|n|yes|no|on|off|true|false|null)$/i.test(key) ? key : JSON.stringify(key);

function flow(value) {
  if (Array.isArray(value)) return `[${value.map(flow).join(", ")}]`;
  if (value !== null && typeof value === "object")
    return `{${Object.entries(value)
      .map(([key, inner]) => `${named(key)}: ${flow(inner)}`)
      .join(", ")}}`;
  // YAML 1.1 takes 1e-7 for a text: its numbers have a point.
  return typeof value === "number" ? String(value).replace(/^(-?\d+)e/, "$1.0e") : JSON.stringify(value);
}

// What a form begins with.
export const example = (name) => `name: ${name}
model: {dim: 128, num_layers: 3, num_heads: 4, num_kv_heads: 2, seq_len: 128}
data: {corpus: python-stdlib}
batch: {global_size: 16, micro_size: 4}
stop: {steps: 120}
elasticity: {min_workers: 1, max_workers: 2}
`;
