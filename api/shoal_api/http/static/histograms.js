// Histograms of one name over the steps of a job, in one of three views. All of a view's histograms share their bins:
// between the lowest and the highest value of them all.
import { bar, hint, picture, svg } from "./dom.js";
import { whole } from "./format.js";

const BINS = 32,
  MOST_COLUMNS = 100,
  MOST_RIDGES = 24,
  WIDTH = 8,
  HEIGHT = 3;
const VIEWS = { map, ridges, step: bars };

// `series`: [step, histogram] in the order of steps; the last one is that of the chosen step.
export function drawn(view, series, words) {
  const most = { map: MOST_COLUMNS, ridges: MOST_RIDGES, step: 1 }[view];
  const shown = binned(spread(series, most)),
    [width, height, parts] = VIEWS[view](shown);
  return [picture(width, height, words, parts, { width: Math.max(160, width), height, "data-view": view }), shown];
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

// The shapes of each step, under its name.
const named = (shown, shapes) =>
  shown.map((one, at) => svg("g", { "data-step": one.step }, [hint(`step ${whole(one.step)}`), ...shapes(one, at)]));
const block = (x, y, width, height, opacity = 1) =>
  bar("", x, y, width, height, { fill: "currentColor", "fill-opacity": opacity });

// Columns are steps, rows bins; darker: more values.
function map(shown) {
  const shapes = (one, column) =>
    one.parts.flatMap((part, bin) =>
      part ? [block(column * WIDTH, (BINS - 1 - bin) * HEIGHT, WIDTH, HEIGHT, Math.max(0.08, Math.sqrt(part)))] : [],
    );
  return [shown.length * WIDTH, BINS * HEIGHT, named(shown, shapes)];
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
    named(shown, (one, row) => [svg("path", { d: line(one, row), class: "ridge" })]),
  ];
}

// One step: bars.
function bars(shown) {
  const height = BINS * HEIGHT,
    top = Math.max(...shown.flatMap((one) => one.parts)) || 1;
  const shapes = (one) =>
    one.parts.flatMap((part, bin) =>
      part ? [block(bin * WIDTH, height * (1 - part / top), WIDTH - 1, (height * part) / top)] : [],
    );
  return [BINS * WIDTH, height, named(shown, shapes)];
}
