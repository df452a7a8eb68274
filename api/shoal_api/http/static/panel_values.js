// Panels of single values: a point or a bar for each job, or the mean of each group. Each returns its marks, for the pointer.
import { short } from "./axes.js";
import { drawGrid } from "./draw_over.js";

export const valueOf = (job, name) => {
  const value = job.values[name] ?? job.values[name.replaceAll('"', "")];
  return typeof value === "number" ? value : typeof value === "string" && value.trim() !== "" ? Number(value) : NaN;
};
const mean = (members, name) => {
  const known = members.map((job) => valueOf(job, name)).filter(Number.isFinite);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : NaN;
};

function around(low, high, isLog) {
  const [from, to] = isLog ? [Math.log10(low), Math.log10(high)] : [low, high],
    margin = (to - from) * 0.06 || Math.abs(to) * 0.1 || 0.5;
  return [from - margin, to + margin];
}

export function drawScatter(pen, spec, shown, colour) {
  const points = shown
    .flatMap(({ key, colour: ink, members }) =>
      members.map((job) => ({ key, ink, job, x: valueOf(job, spec.x), y: valueOf(job, spec.y) })),
    )
    .filter(({ x, y }) => Number.isFinite(x) && (spec.log_y ? y > 0 : Number.isFinite(y)));
  if (!points.length) return [];
  const xs = points.map(({ x }) => x),
    ys = points.map(({ y }) => y),
    logX = Math.min(...xs) > 0 && Math.max(...xs) / Math.min(...xs) >= 50;
  const [x0, x1] = around(Math.min(...xs), Math.max(...xs), logX),
    [y0, y1] = around(Math.min(...ys), Math.max(...ys), spec.log_y);
  const { context, ratio } = pen,
    size = 4 * ratio;
  pen.setView({ x0, x1, y0, y1, logX, logY: spec.log_y });
  drawGrid(pen, colour);
  return points.map(({ key, ink, job, x, y }) => {
    const left = pen.x(x),
      top = pen.y(y);
    context.fillStyle = ink;
    context.beginPath();
    context.arc(left, top, size, 0, 7);
    context.fill();
    const words = `${job.name}: ${spec.x} ${short(x)}, ${spec.y} ${short(y)}`;
    return { key, colour: ink, x0: left - size, x1: left + size, y0: top - size, y1: top + size, words };
  });
}

export function drawBars(pen, spec, shown, colour) {
  const bars = shown
    .map(({ key, name, colour: ink, members }) => ({ key, name, ink, y: mean(members, spec.y), count: members.length }))
    .filter(({ y }) => (spec.log_y ? y > 0 : Number.isFinite(y)))
    .sort((a, b) => b.y - a.y);
  if (!bars.length) return [];
  const ys = bars.map(({ y }) => y),
    [low, high] = spec.log_y
      ? around(Math.min(...ys), Math.max(...ys), true)
      : [Math.min(0, ...ys), Math.max(0, ...ys) * 1.05 || 1];
  const { context, ratio } = pen,
    wide = pen.width / bars.length;
  pen.setView({ x0: 0, x1: bars.length, y0: low, y1: high, logX: false, logY: spec.log_y });
  drawGrid(pen, colour, () => "");
  return bars.map(({ key, name, ink, y, count }, index) => {
    const left = pen.left + index * wide + Math.min(2, wide * 0.1),
      width = Math.max(1, wide - Math.min(4, wide * 0.2)),
      top = pen.y(y),
      base = spec.log_y ? pen.bottom : pen.y(0);
    context.fillStyle = ink;
    context.fillRect(left, Math.min(top, base), width, Math.max(1, Math.abs(base - top)));
    if (wide > 56 * ratio)
      pen.text(name.slice(0, 14), left + width / 2, pen.bottom + 5 * ratio, {
        colour: colour.dim,
        baseline: "top",
        most: wide,
      });
    const words = `${name}: ${short(y)}${count > 1 ? `, mean of ${count} jobs` : ""}`;
    return { key, colour: ink, x0: left, x1: left + width, y0: pen.top, y1: pen.bottom, words };
  });
}
