// A stripe of amounts by name, each as wide as its share, and the items of its key.
import { bar, element, picture } from "./dom.js";
import { seconds, words } from "./format.js";

export const CATEGORIES = [
  "productive",
  "recomputed",
  "checkpoint_stall",
  "recovering",
  "resizing",
  "degraded",
  "starting",
  "queued",
  "idle",
];
export const PHASES = ["detect", "quiesce", "plan", "form", "restore", "first_step"];

export function stripe(parts, width, height, name) {
  const total = parts.reduce((sum, [, amount]) => sum + amount, 0);
  let left = 0;
  const shapes = parts.map(([part, amount]) => {
    const wide = total ? (width * amount) / total : 0;
    left += wide;
    return bar(`${words(part)} ${seconds(amount)}`, left - wide, 0, wide, height, { class: part });
  });
  return picture(width, height, name, shapes, { class: "phases" });
}

export const key = (name, amount = "", detail = "") =>
  element("li", [
    element("span", "", { class: `swatch ${name}` }),
    words(name),
    " ",
    element("span.dim", amount),
    element("span.dim", detail && ` (${detail})`),
  ]);

// What was recovered from, the longest first.
export const causesOf = ({ recovering }) =>
  Object.entries(recovering)
    .sort((a, b) => b[1] - a[1])
    .map(([cause, amount]) => `${words(cause)} ${seconds(amount)}`)
    .join(", ");
