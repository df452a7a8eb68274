// Parallel axes: one for each label that differs, then the results; a line for each job, from blue (the best) to red. Lines
// of a colour are one trace, so that two hundred jobs are drawn at once. Ordinary scatter traces: Plotly's own parallel
// coordinates need WebGL, which many machines lack.
import { $ } from "./dom.js";
import { compare, number } from "./format.js";
import { plot } from "./plot.js";
import { colours } from "./looks.js";

const TIERS = 9,
  WIDEST_RATIO = 30,
  AXIS_PX = 96;

// jobs: the best first; axes: [title, (job) => value]; most: so many of the best are drawn in colour, the others pale.
export function drawAxes(jobs, columns, most) {
  const axes = columns.map(([title, value]) =>
      scale(
        title,
        jobs.map((job) => value(job) ?? null),
      ),
    ),
    colour = colours();
  const tiers = new Map();
  jobs.forEach((job, rank) => {
    const isPale = job.reason === "pruned" || rank >= most;
    const key = isPale ? -1 : Math.floor((rank * TIERS) / Math.max(1, Math.min(jobs.length, most)));
    if (!tiers.has(key)) tiers.set(key, { x: [], y: [], text: [] });
    const tier = tiers.get(key);
    axes.forEach((axis, place) => {
      tier.x.push(place);
      tier.y.push(axis.y[rank]);
      tier.text.push(
        `${job.name}${job.reason === "pruned" ? " (pruned)" : ""}<br>${axis.title}: ${axis.values[rank] ?? "–"}`,
      );
    });
    tier.x.push(null);
    tier.y.push(null);
    tier.text.push("");
  });
  const many = jobs.length > 40;
  const traces = [...tiers]
    .sort(([a], [b]) => (a < 0 ? -1 : b < 0 ? 1 : b - a))
    .map(([key, tier]) => ({
      ...tier,
      type: "scatter",
      mode: "lines+markers",
      connectgaps: false,
      hovertemplate: "%{text}<extra></extra>",
      name: key < 0 ? "pruned or not chosen" : `tier ${key + 1}`,
      line: {
        width: key === 0 ? 2.5 : many ? 1 : 2,
        color: key < 0 ? colour.line : shade(key / (TIERS - 1)),
        dash: key < 0 ? "dot" : "solid",
      },
      opacity: key < 0 || !many ? 1 : 0.75,
      marker: { size: many ? 3 : 6 },
    }));
  const ends = axes.flatMap((axis, place) =>
    [
      [axis.low, 0, "top"],
      [axis.high, 1, "bottom"],
    ].map(([text, y, anchor]) => ({
      x: place,
      y,
      text: short(String(text ?? "–"), 13),
      showarrow: false,
      yanchor: anchor,
      font: { size: 11, color: colour.dim },
    })),
  );
  $("chart").style.minWidth = `${axes.length * AXIS_PX}px`;
  plot(
    "chart",
    traces,
    {
      height: 430,
      margin: { l: 46, r: 46, t: 26, b: 40 },
      annotations: ends,
      hovermode: "closest",
      xaxis: {
        tickvals: axes.map((_, place) => place),
        ticktext: axes.map((axis) => short(axis.title, 14) + (axis.isLog ? " (log)" : "")),
        range: [-0.25, axes.length - 0.75],
        gridcolor: colour.dim,
        gridwidth: 1.5,
        zeroline: false,
        fixedrange: true,
        tickangle: 0,
      },
      yaxis: { visible: false, range: [-0.14, 1.14], fixedrange: true },
    },
    12,
  );
  $("chart").setAttribute(
    "aria-label",
    `Parallel axes of ${jobs.length} jobs: ${axes.map((axis) => `${axis.title} from ${axis.low} to ${axis.high}`).join(", ")}. The table below has the values.`,
  );
}

// Places between 0 and 1. Words take equal distances; positive numbers over more than a factor of 30 are logarithmic.
function scale(title, values) {
  const known = values.filter((value) => value !== null),
    areNumbers = known.length && known.every((value) => typeof value === "number");
  const words = areNumbers ? [] : [...new Set(known.map(String))].sort(compare),
    ends = areNumbers ? [Math.min(...known), Math.max(...known)] : [0, words.length - 1];
  const isLog = ends[0] > 0 && ends[1] / ends[0] > WIDEST_RATIO,
    at = (value) => (!areNumbers ? words.indexOf(String(value)) : isLog ? Math.log(value) : value);
  const [low, high] = areNumbers ? ends.map(at) : ends,
    [first, last] = ends.map((end) => (areNumbers ? number(end, 3) : words[end]));
  const y = values.map((value) => (value === null ? null : high > low ? (at(value) - low) / (high - low) : 0.5));
  return { title, values, isLog, low: first, high: last, y };
}

const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
const shade = (share) => `hsl(${Math.round(215 - 205 * share)} 68% 50%)`;
