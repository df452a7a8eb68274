// Histograms of one name over the steps of a job, in one of three views. All of a view's histograms share their bins:
// between the lowest and the highest value of them all.
import { hint, svg } from "./dom.js";
import { whole } from "./format.js";

const BINS = 32,
  MOST_COLUMNS = 100,
  MOST_RIDGES = 24,
  WIDTH = 8,
  HEIGHT = 3;
export const VIEWS = { map, ridges, step: bars };

// `series`: [step, histogram] in the order of steps; the last one is that of the chosen step.
export function drawn(view, series, words) {
  const most = { map: MOST_COLUMNS, ridges: MOST_RIDGES, step: 1 }[view];
  const shown = binned(spread(series, most)),
    [width, height, parts] = VIEWS[view](shown);
  return [
    svg(
      "svg",
      {
        viewBox: `0 0 ${width} ${height}`,
        width: Math.max(160, width),
        height,
        preserveAspectRatio: "none",
        role: "img",
        "aria-label": words,
        "data-view": view,
      },
      parts,
    ),
    shown,
  ];
}

// Evenly spaced, the first and the last one among them.
const spread = (all, most) =>
  all.length <= most
    ? all
    : most === 1
      ? all.slice(-1)
      : Array.from({ length: most }, (_, index) => all[Math.floor((index * (all.length - 1)) / (most - 1))]);

// The part of the values that is in each of BINS bins, by step.
function binned(series) {
  const full = series.filter(([, one]) => one.counts.length),
    low = Math.min(...full.map(([, one]) => one.low)),
    high = Math.max(...full.map(([, one]) => one.high)),
    span = high - low || 1;
  return full.map(([step, one]) => {
    const parts = Array(BINS).fill(0),
      total = one.counts.reduce((sum, count) => sum + count, 0) || 1;
    one.counts.forEach((count, bin) => {
      const value = one.low + ((bin + 0.5) / one.counts.length) * (one.high - one.low);
      parts[Math.min(BINS - 1, Math.max(0, Math.floor(((value - low) / span) * BINS)))] += count / total;
    });
    return { step, parts };
  });
}

const named = ({ step }, parts) => svg("g", { "data-step": step }, [hint(`step ${whole(step)}`), ...parts]);

// Columns are steps, rows bins; darker: more values.
function map(shown) {
  const cell = (part, column, bin) =>
    svg("rect", {
      x: column * WIDTH,
      y: (BINS - 1 - bin) * HEIGHT,
      width: WIDTH,
      height: HEIGHT,
      fill: "currentColor",
      "fill-opacity": Math.max(0.08, Math.sqrt(part)),
    });
  return [
    shown.length * WIDTH,
    BINS * HEIGHT,
    shown.map((one, column) =>
      named(
        one,
        one.parts.flatMap((part, bin) => (part ? [cell(part, column, bin)] : [])),
      ),
    ),
  ];
}

// Lines are steps, the newest one in front; values grow to the right.
function ridges(shown) {
  const gap = 8,
    rise = 40,
    top = Math.max(...shown.flatMap((one) => one.parts)) || 1;
  const line = (one, row) => {
    const base = rise + row * gap;
    return `M0 ${base} ${one.parts.map((part, bin) => `L${(bin + 0.5) * WIDTH} ${(base - (part / top) * rise).toFixed(1)}`).join(" ")} L${BINS * WIDTH} ${base} Z`;
  };
  return [
    BINS * WIDTH,
    rise + (shown.length - 1) * gap + 2,
    shown.map((one, row) => named(one, [svg("path", { d: line(one, row), class: "ridge" })])),
  ];
}

// One step: bars.
function bars(shown) {
  const height = BINS * HEIGHT,
    top = Math.max(...shown.flatMap((one) => one.parts)) || 1;
  return [
    BINS * WIDTH,
    height,
    shown.map((one) =>
      named(
        one,
        one.parts.flatMap((part, bin) =>
          part
            ? [
                svg("rect", {
                  x: bin * WIDTH,
                  y: height * (1 - part / top),
                  width: WIDTH - 1,
                  height: (height * part) / top,
                  fill: "currentColor",
                }),
              ]
            : [],
        ),
      ),
    ),
  ];
}
