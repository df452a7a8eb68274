// A stripe of amounts by name, each as wide as its share, and the items of its key.
import { element, hint, svg } from "./dom.js";
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
  return svg(
    "svg",
    {
      viewBox: `0 0 ${width} ${height}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": name,
      class: "phases",
    },
    parts.map(([part, amount]) => {
      const wide = total ? (width * amount) / total : 0;
      left += wide;
      return svg("rect", { x: left - wide, y: 0, width: wide, height, class: part }, [
        hint(`${words(part)} ${seconds(amount)}`),
      ]);
    }),
  );
}

export const key = (name, amount = "", detail = "") =>
  element("li", [
    element("span", "", { class: `swatch ${name}` }),
    words(name),
    " ",
    element("span", amount, { class: "dim" }),
    element("span", detail && ` (${detail})`, { class: "dim" }),
  ]);
