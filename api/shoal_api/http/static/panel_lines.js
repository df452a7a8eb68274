// What a panel of curves draws: a line for each job or group that is shown, and the part of the axes that they need. Pure.
import { indexAt, isMetricAxis, ordered, positions, quantile, smoothed, together } from "./curve_data.js";

const OUTSIDE = 0.01; // of the values at each end, if outliers are left out

// shown: [{ key, name, colour, dash, members: [job] }]; curveOf(job): its curve. A group of several jobs has a band.
export function linesOf(shown, curveOf, metric, { axis, smoothing, band }, isGrouped) {
  const made = [];
  for (const { key, name, colour, dash, members } of shown) {
    const curves = [];
    for (const job of members) {
      const curve = curveOf(job),
        xs = positions(job, curve, axis),
        ys = smoothed(curve, metric, smoothing);
      if (xs && ys && xs.length) curves.push(isMetricAxis(axis) ? ordered({ xs, ys }) : { xs, ys });
    }
    if (!curves.length) continue;
    made.push({ key, name, colour, dash, ...(isGrouped ? together(curves, band) : curves[0]) });
  }
  return made;
}

// Sets the part of each line that the zoom shows, with a point beyond each end; returns the view. Without outliers it spans
// the middle 98 % of the values.
export function viewOf(lines, { zoom, logX, logY, isTrimmed }) {
  let x0 = Infinity,
    x1 = -Infinity,
    y0 = Infinity,
    y1 = -Infinity;
  for (const line of lines) {
    const { xs } = line,
      first = logX ? indexAt(xs, Number.MIN_VALUE) : 0;
    line.from = first;
    line.to = xs.length;
    if (first >= xs.length) {
      line.from = line.to = 0;
      continue;
    }
    if (zoom) {
      line.from = Math.max(first, indexAt(xs, zoom[0]) - 1);
      line.to = Math.min(xs.length, indexAt(xs, zoom[1]) + 1);
    }
    x0 = Math.min(x0, xs[first]);
    x1 = Math.max(x1, xs[xs.length - 1]);
    for (const ys of line.least ? [line.least, line.most] : [line.ys])
      for (let at = line.from; at < line.to; at += 1) {
        const value = ys[at];
        if (logY ? !(value > 0) : value !== value) continue;
        if (value < y0) y0 = value;
        if (value > y1) y1 = value;
      }
  }
  if (zoom) [x0, x1] = zoom;
  if (isTrimmed) {
    const all = Float64Array.from(
      lines.flatMap(({ ys, from, to }) =>
        [...ys.subarray(from, to)].filter((value) => (logY ? value > 0 : value === value)),
      ),
    ).sort();
    if (all.length) {
      y0 = quantile(all, OUTSIDE);
      y1 = quantile(all, 1 - OUTSIDE);
    }
  }
  if (!(x0 <= x1) || !(y0 <= y1)) return null;
  if (logX) {
    x0 = Math.log10(Math.max(x0, x1 * 1e-9));
    x1 = Math.log10(x1);
  }
  if (logY) {
    y0 = Math.log10(y0);
    y1 = Math.log10(y1);
  }
  if (x0 === x1) {
    x0 -= 0.5;
    x1 += 0.5;
  }
  const margin = (y1 - y0) * 0.04 || Math.abs(y1) * 0.05 || 0.5;
  return { x0, x1, y0: y0 - margin, y1: y1 + margin, logX, logY };
}

// What the axis of a view spans, in words.
export function extentOf(view, words) {
  if (!view) return "";
  const [low, high] = view.logX ? [10 ** view.x0, 10 ** view.x1] : [view.x0, view.x1];
  return `, from ${words(low)} to ${words(high)}`;
}
