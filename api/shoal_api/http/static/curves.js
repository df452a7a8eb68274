// All curves of a job in one chart with one axis: so crosshair, zoom, incidents and generations are shared. Plotly draws.
import { $ } from "./dom.js";
import { keep, keepControls, kept, offer } from "./address.js";
import { jobPath, request } from "./api.js";
import { colours, onThemeChange } from "./looks.js";
import { joined, plural, seconds, unitOf, words } from "./format.js";
import { axisName, curve, DOTTED, followZoom, grid, markers, plot, stacked } from "./plot.js";
import {
  anomalies,
  columnsWithValues,
  lastValue,
  places,
  refined,
  shares,
  smooth,
  stepAt,
  wordsOfColumn,
} from "./curve_data.js";

// Title, share of the height, column that a script may not report.
const ROWS = [
  ["loss", 0.26, "loss"],
  ["tokens/s", 0.13, "tokens_per_s"],
  ["gradient norm", 0.13, "grad_norm"],
  ["learning rate", 0.09, "lr"],
  ["world size", 0.12],
  ["goodput", 0.15],
  ["incidents", 0.06],
];
const [LOSS, SPEED, NORM, RATE, WORLD, GOODPUT, INCIDENTS] = ROWS.keys();
const PAUSE_MS = 700;
const HEIGHT = 1080;
const SHARE = 0.13; // of a metric of the task's own

export class Curves {
  constructor(id, shown) {
    this.id = id;
    this.shown = shown;
    this.timer = null;
    this.drawn = 0;
    this.detail = null;
    keepControls(["axis", "log", "smoothing"], (name) => {
      if (name === "axis") {
        keep("zoom", "");
        this.zoom(null);
      }
      this.draw(true);
    });
    document.addEventListener("visibilitychange", () => this.draw());
    onThemeChange(() => this.draw(true));
    if (kept("zoom")) this.zoom(kept("zoom").split(",").map(Number));
  }

  draw(now = false) {
    if (document.hidden || !this.shown.job || !this.shown.series || !this.shown.samples) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.render(), now ? 0 : Math.max(0, this.drawn + PAUSE_MS - performance.now()));
  }

  // In a tab that is not open the chart has no width. It is drawn when the tab is opened.
  isHidden(id = "curves") {
    return Boolean($(id).closest(`[hidden]:not(#${id}, #loss-card)`));
  }

  render() {
    this.drawn = performance.now();
    if (!this.isHidden("loss-chart")) this.renderLoss();
    if (this.isHidden()) return;
    const isEmpty = ($("curves").hidden = !this.shown.series.step.length);
    $("uncurved").hidden = !isEmpty;
    if (isEmpty) return;
    const series = this.detail ? refined(this.shown.series, this.detail) : this.shown.series;
    offer($("axis"), columnsWithValues(series, ["loss", "val_loss", "tokens_per_s", "grad_norm", "lr"]), wordsOfColumn);
    const axis = $("axis").value,
      colour = colours(),
      unit = unitOf(this.shown.job);
    const { status } = this.shown.job;
    const tokens = status.step && status.tokens ? status.tokens / status.step : 1;
    const x = (columns) => places(axis, columns, tokens);
    const isOverMetric = !["step", "tokens", "time"].includes(axis), // then it has no place for what goes over time
      rows = rowsOf(series, unit).slice(0, isOverMetric ? WORLD : undefined);
    const when = (at) =>
      axis === "time" ? new Date(at * 1000) : stepAt(series, at) * (axis === "tokens" ? tokens : 1);
    const names = namesOf(series),
      weight = Number($("smoothing").value);
    const traces = [
      ...this.values(series, x(series), colour),
      ...metricTraces(series, names, x(series), weight, colour, rows.length),
      ...(isOverMetric
        ? []
        : [...this.accounts(x(this.shown.samples), colour), incidents(this.shown.incidents, when, colour)]),
    ];
    const { shapes, labels } = isOverMetric ? {} : bands(this.shown, when);
    const layout = stacked(
      [...rows, ...names.map((name) => [name, SHARE])],
      axis === "time" ? { type: "date" } : { title: { text: axis === "tokens" ? unit : wordsOfColumn(axis) } },
      HEIGHT,
      { margin: { l: 58, r: 12, t: 24, b: 40 }, uirevision: axis, shapes, annotations: labels },
    );
    plot("curves", traces, layout).then((chart) => followZoom(chart, (range) => this.zoom(range)));
  }

  renderLoss() {
    const { series } = this.shown;
    const isEmpty = ($("loss-card").hidden = series.loss.every((value) => value === null));
    if (isEmpty) return;
    const traces = this.values(series, series.step, colours()).filter((trace) => trace.yaxis === axisName(LOSS));
    plot("loss-chart", traces, {
      height: 240,
      hovermode: "x",
      xaxis: { ...grid(), title: { text: "step" } },
      yaxis: { ...grid(), type: scale() },
    });
  }

  values(series, x, colour) {
    const weight = Number($("smoothing").value),
      faint = { opacity: 0.25, hoverinfo: "skip" };
    return [
      ...(weight ? [curve(LOSS, "loss, not smoothed", x, series.loss, colour.run, faint)] : []),
      curve(LOSS, "loss", x, smooth(series.loss, weight), colour.run),
      curve(LOSS, "validation", x, series.val_loss, colour.warn, DOTTED),
      curve(SPEED, "tokens/s", x, smooth(series.tokens_per_s, weight), colour.accent),
      curve(NORM, "gradient norm", x, smooth(series.grad_norm, weight), colour.purple),
      curve(RATE, "learning rate", x, series.lr, colour.blue),
      ...this.marks(LOSS, series.loss, x, colour),
      ...this.marks(NORM, series.grad_norm, x, colour),
    ];
  }

  // Where a value is not finite, and where it is far above those before it. A script may leave steps out, so it has no gaps.
  marks(row, values, x, colour) {
    const { gaps, spikes } = anomalies(values);
    const marks = (name, symbol, indexes) =>
      markers(
        row,
        name,
        indexes.map((index) => x[index]),
        indexes.map((index) => values[index] ?? lastValue(values, index)),
        { symbol, size: 9, color: colour.bad },
        `${name}<extra></extra>`,
      );
    return [
      marks("not finite", "x", this.shown.job.spec.script ? [] : gaps),
      marks("spike: %{y:.5g}", "triangle-up-open", spikes),
    ].filter(({ x }) => x.length);
  }

  accounts(x, colour) {
    const { samples } = this.shown;
    const stair = (name, y, ink, dash) =>
      curve(WORLD, name, x, y, ink, { line: { shape: "hv", dash }, hovertemplate: "%{y}" });
    return [
      stair("wanted", samples.wanted, colour.dim, "dot"),
      stair("granted", samples.granted, colour.warn, "dash"),
      stair("had", samples.workers, colour.done),
      ...Object.entries(shares(samples)).map(([name, y]) =>
        curve(GOODPUT, words(name), x, y, partColour(name), {
          stackgroup: "goodput",
          line: { width: 0, shape: "vh" },
          hovertemplate: "%{y:.0%}",
        }),
      ),
    ];
  }

  // Zoomed in, finer points of that range are asked for; the stream goes on beside them.
  async zoom(range) {
    this.detail = null;
    if (range && $("axis").value === "step") {
      const [after, until] = [Math.max(0, Math.floor(range[0]) - 1), Math.max(1, Math.ceil(range[1]))];
      const { items } = await request(
        `${jobPath(this.id)}/series?after_step=${after}&until_step=${until}&max_points=1000`,
      );
      this.detail = items;
    }
    this.draw(true);
  }
}

const scale = () => ($("log").checked ? "log" : "linear");

function rowsOf(series, unit) {
  const more = {
    [LOSS]: { type: scale() },
    [NORM]: { type: scale() },
    [WORLD]: { rangemode: "tozero", fixedrange: true },
    [GOODPUT]: { range: [0, 1], tickformat: ".0%", fixedrange: true },
    [INCIDENTS]: { range: [0, 1], showticklabels: false, showgrid: false, fixedrange: true },
  };
  return ROWS.map(([title, share, column], row) => {
    const isSilent = column && series[column].every((value) => value === null);
    return [`${title.replace("tokens", unit)}${isSilent ? "<br>not reported" : ""}`, share, more[row]];
  });
}

function partColour(name) {
  const probe = document.createElement("span");
  probe.className = name;
  document.body.append(probe);
  const found = getComputedStyle(probe).getPropertyValue("--part").trim();
  probe.remove();
  return found || colours().dim;
}

function incidents(all, when, colour) {
  const text = all.map((one) =>
    joined(
      [
        words(one.cause),
        one.ranks.length ? `rank ${one.ranks.join(", ")}` : "",
        `${one.from_layout || one.from_workers} → ${one.to_layout ?? one.to_workers ?? "…"}`,
        `recovery ${seconds(one.recovery_s)}`,
        `${plural(one.steps_lost, "step")} lost`,
        one.state_source ? `state from ${one.state_source}` : "",
      ],
      "<br>",
    ),
  );
  return markers(
    INCIDENTS,
    "incident",
    all.map((one) => when(one.at)),
    all.map(() => 0.5),
    { symbol: "diamond", size: 11, color: all.map((one) => (one.closed ? colour.bad : colour.warn)) },
    "%{text}",
    { text },
  );
}

// Generations as bands behind the curves, resizes and incidents as lines through all of them.
function bands({ events, incidents, job }, when) {
  const colour = colours();
  const formed = events.filter((one) => one.type === "generation.formed");
  const shapes = [],
    labels = [];
  formed.forEach((one, index) => {
    const end = formed[index + 1]?.at ?? job.updated_at;
    const more = { fillcolor: colour.ink, opacity: 0.05, line: { width: 0 }, layer: "below" };
    if (index % 2) shapes.push(span("rect", when(one.at), when(end), more));
    labels.push({
      x: when(one.at),
      y: 1,
      xref: "x",
      yref: "paper",
      xanchor: "left",
      yanchor: "bottom",
      showarrow: false,
      text: `${one.data.workers}w ${one.data.layout ?? ""}`,
      font: { size: 9, color: colour.dim },
      hovertext: `generation ${one.data.generation}`,
    });
  });
  for (const one of events.filter((event) => event.type === "generation.switching"))
    shapes.push(line(when(one.at), colour.purple, "dot"));
  for (const one of incidents) shapes.push(line(when(one.at), one.closed ? colour.bad : colour.warn, "dash"));
  return { shapes, labels: labels.slice(-12) };
}

// Over the whole height of the chart.
const span = (type, x0, x1, more) => ({ type, xref: "x", yref: "paper", x0, x1, y0: 0, y1: 1, ...more });
const line = (x, color, dash) => span("line", x, x, { line: { color, dash, width: 1.2 } });

// Metrics of the task's own: a row of the chart for each name, training and validation in one.
const namesOf = (series) => [...new Set([...Object.keys(series.metrics), ...Object.keys(series.val_metrics)])].sort();

// first: the row of the first metric in the chart.
function metricTraces(series, names, x, weight, colour, first) {
  return names.flatMap((name, place) => {
    const { [name]: trained } = series.metrics,
      { [name]: validated } = series.val_metrics,
      row = first + place;
    return [
      ...(trained ? [curve(row, name, x, smooth(trained, weight), colour.run, { connectgaps: true })] : []),
      ...(validated ? [curve(row, `${name}, validation`, x, validated, colour.warn, DOTTED)] : []),
    ];
  });
}
