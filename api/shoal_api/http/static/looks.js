// Colours. Those of charts are read from the style sheet, so that light and dark are decided in one place. That of a run is the same on
// every page, and runs of one chart that share it differ by their dashes.
export const PALETTE = [
  "#2f7de1",
  "#e07b39",
  "#2a9d6f",
  "#b0559b",
  "#c9a227",
  "#d1495b",
  "#4aa3b5",
  "#7d6ad6",
  "#7f8c3a",
  "#8a6d5b",
];
// By the name that Plotly has for it: lengths of strokes and gaps of a canvas.
export const DASHES = { solid: [], dash: [7, 4], dot: [2, 3], dashdot: [7, 3, 2, 3], longdash: [12, 4] };

// keys: of runs or groups in their order; colours: those that a user has chosen, by key.
export function looksOf(keys, colours = {}) {
  const seen = new Map(),
    names = Object.keys(DASHES);
  return new Map(
    keys.map((key) => {
      const colour = colours[key] ?? PALETTE[hash(key) % PALETTE.length],
        num = seen.get(colour) ?? 0;
      seen.set(colour, num + 1);
      return [key, { colour, dash: names[num % names.length] }];
    }),
  );
}

// FNV-1a
function hash(text) {
  let value = 2166136261;
  for (let at = 0; at < text.length; at += 1) value = Math.imul(value ^ text.charCodeAt(at), 16777619);
  return value >>> 8;
}

export function colours() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(
    ["ink", "dim", "line", "card", "accent", "run", "done", "bad", "warn", "queue", "purple", "blue"].map((name) => [
      name,
      style.getPropertyValue(`--${name}`).trim(),
    ]),
  );
}
const dark = matchMedia("(prefers-color-scheme: dark)");
export const onThemeChange = (redraw) => dark.addEventListener("change", redraw);
