// Numbers, times and names as text for people, and their order. Pure.
export const number = (value, digits = 4) =>
  value === null || value === undefined ? "–" : Number(value.toPrecision(digits)).toLocaleString();
export const whole = (value) => (value === null || value === undefined ? "–" : value.toLocaleString());
export const percent = (share) =>
  share === null || share === undefined ? "–" : `${number(100 * share, share < 0.1 ? 2 : 3)} %`;
export const words = (name) => name.replaceAll("_", " ");
export const plural = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
export const clock = (at) => moment(at).slice(11);
export const moment = (at) => (at === null || at === undefined ? "–" : new Date(at * 1000).toLocaleString("sv-SE")); // 2026-11-29 01:24:05, in the zone of the browser
export const brief = (at) => moment(at).slice(0, 16);

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${number(value * 1000, 3)} ms`;
  if (value < 90) return `${number(value, 3)} s`;
  if (value < 5400) return `${number(value / 60, 3)} min`;
  return value < 172800 ? `${number(value / 3600, 3)} h` : `${number(value / 86400, 3)} d`;
}

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = count,
    unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${number(value, 3)} ${units[unit]}`;
}

// "–": no step is known, as of a script that reports none.
export const steps = ({ step, total_steps: total }) =>
  step || total ? whole(step) + (total ? ` / ${whole(total)}` : "") : "–";
export const progressOf = ({ step, total_steps: total }) => (total ? Math.min(1, step / total) : null);
// What a task without tokens trains on are samples: one token each.
export const unitOf = ({ spec, status }) =>
  spec.loop || (!spec.script && status.step && status.tokens === status.step * spec.batch.global_size)
    ? "samples"
    : "tokens";
// What a script has not said of itself; nothing before its first group.
export const reported = ({ spec, status }, text) =>
  text === "–" && spec.script && status.generation ? "not reported" : text;
export const grant = (one) =>
  one.workers === one.desired_workers ? whole(one.workers) : `${one.workers} of ${one.desired_workers}`;

export const numeric = (text) =>
  text !== undefined && text !== "" && Number.isFinite(Number(text)) ? Number(text) : text;

export function compare(a, b) {
  if (a === null || a === undefined || b === null || b === undefined)
    return (a === null || a === undefined) - (b === null || b === undefined);
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), undefined, { numeric: true });
}

export const wordsIn = (text) => text.split(/[\s,]+/).filter(Boolean);
// Those of the texts that are not empty.
export const joined = (texts, between = ", ") => texts.filter(Boolean).join(between);
export const pairs = (labels) =>
  Object.entries(labels)
    .map(([key, value]) => `${key}=${value}`)
    .join(" ");
