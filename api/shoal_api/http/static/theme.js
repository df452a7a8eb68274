// Colours for charts, read from the style sheet, so that light and dark are decided in one place.
export function colours() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(
    ["ink", "dim", "line", "card", "accent", "run", "done", "bad", "warn", "queue", "purple", "blue"].map((name) => [
      name,
      style.getPropertyValue(`--${name}`).trim(),
    ]),
  );
}
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
const dark = matchMedia("(prefers-color-scheme: dark)");
export const onThemeChange = (redraw) => dark.addEventListener("change", redraw);
