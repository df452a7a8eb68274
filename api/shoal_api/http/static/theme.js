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
const dark = matchMedia("(prefers-color-scheme: dark)");
export const onThemeChange = (redraw) => dark.addEventListener("change", redraw);
