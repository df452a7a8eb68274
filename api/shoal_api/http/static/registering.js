// The changes of the registry, each as an action of the dialog: what it does, and what serving reads from then on.
import { modelPath, post, put, remove } from "./api.js";
import { field, refresh } from "./dialog.js";
import { bytes, number, whole } from "./format.js";

const NAME = /^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$/,
  ALIAS = /^[A-Za-z]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$/;
const encoded = encodeURIComponent;
const madeOf = (one) => `step ${whole(one.step)} of job ${one.job_id}`;
const plain = (words, attributes) =>
  field(words, { id: undefined, size: 18, autocomplete: "off", spellcheck: "false", ...attributes });
const sent = (label) => label.querySelector("input").value.trim();

// { job, step, size }: a checkpoint whose button was pressed; without one, the dialog asks for the job and the step.
export function register(checkpoint, done) {
  const job = plain("Job", { placeholder: "its id" }),
    step = plain("Step", { type: "number", min: 0, placeholder: "newest" });
  const name = plain("Model", { id: "dialog-value", placeholder: "for example speech" }),
    description = plain("Description", { maxlength: 4096, size: 34 });
  for (const one of [job, step]) one.addEventListener("input", refresh);
  const of = () =>
    checkpoint
      ? `The checkpoint of step ${whole(checkpoint.step)}`
      : `The ${sent(step) ? `checkpoint of step ${whole(Number(sent(step)))}` : "newest checkpoint"} of job ${sent(job) || "…"}`;
  return {
    title: checkpoint ? `Register the checkpoint of step ${whole(checkpoint.step)}` : "Register a checkpoint",
    confirm: "Register",
    input: [...(checkpoint ? [] : [job, step]), name, description],
    words: (value) => {
      if (!NAME.test(value.trim()))
        return "A name has letters, digits, dots, dashes and underscores, and begins and ends with a letter or a digit.";
      return `${of()} becomes the next version of ${value.trim()} in the project of its job. Nothing deletes it while it is registered${checkpoint?.size ? `, and it takes ${bytes(checkpoint.size)} of storage` : ""}. Serving that reads ${value.trim()}@latest loads it from then on; what an alias such as prod names does not change.`;
    },
    send: async (value) => {
      const body = {
        job: checkpoint?.job ?? sent(job),
        step: checkpoint ? checkpoint.step : sent(step) ? Number(sent(step)) : null,
        description: sent(description),
      };
      await done(await post(`/v1/models/${encoded(value.trim())}/versions`, body));
    },
  };
}

// Sets or moves an alias. `versions`: all of the registry, to say what the alias names now.
export function setAlias(one, versions, done) {
  const own = versions.filter((other) => other.project === one.project && other.name === one.name);
  return {
    title: `An alias for ${one.name}@${one.version}`,
    confirm: "Set the alias",
    input: [
      plain("Alias", {
        id: "dialog-value",
        value: own.flatMap((other) => other.aliases).find((word) => !one.aliases.includes(word)) ?? "prod",
      }),
    ],
    words: (value) => {
      const word = value.trim(),
        before = own.find((other) => other.aliases.includes(word));
      if (!ALIAS.test(word)) return "An alias begins with a letter, such as prod or staging.";
      if (before?.version === one.version) return `${one.name}@${word} is this version already.`;
      const now = before
        ? `${one.name}@${word} is version ${before.version} now, ${madeOf(before)}.`
        : `${one.name}@${word} names nothing yet.`;
      return `${now} From then on it is version ${one.version}, ${madeOf(one)}: serving that reads ${one.name}@${word} loads ${one.url}, as soon as it asks again.${before ? compared(before, one) : ""}`;
    },
    send: (value) => put(`${modelPath(one)}/aliases/${encoded(value.trim())}`, { version: one.version }).then(done),
  };
}

export function deleteAlias(one, word, done) {
  return {
    title: `Delete the alias ${word}`,
    confirm: "Delete the alias",
    words: () =>
      `${one.name}@${word} names nothing from then on: serving that asks for it is answered with 404, and one that starts anew has nothing to load. Version ${one.version} stays registered.`,
    send: () => remove(`${modelPath(one)}/aliases/${encoded(word)}`).then(done),
  };
}

export function removeVersion(one, done) {
  const lost = one.aliases.length
    ? ` Serving that reads ${one.aliases.map((word) => `${one.name}@${word}`).join(" or ")} is answered with 404 from then on.`
    : "";
  const files =
    one.state === null
      ? "Its job was deleted, so nothing lists or deletes its files any more."
      : "Its checkpoint stays until the retention of its job, or a user, deletes it.";
  return {
    title: `Remove ${one.name}@${one.version}`,
    confirm: "Remove the version",
    words: () =>
      `The version is taken out of the registry, and its number is not given again.${lost} ${files} This cannot be undone.`,
    send: () => remove(`${modelPath(one)}/versions/${one.version}`).then(done),
  };
}

// What both versions have measured, before and after.
function compared(before, after) {
  const shared = Object.keys(after.metrics).filter((name) => name in before.metrics);
  return shared.length
    ? ` At their steps: ${shared.map((name) => `${name} ${number(before.metrics[name])} → ${number(after.metrics[name])}`).join(", ")}.`
    : "";
}
