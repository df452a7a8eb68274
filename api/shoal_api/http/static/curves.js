// All curves of a job in one chart with one axis: so crosshair, zoom, incidents and generations are shared. Plotly draws.
import { $ } from "./dom.js";
import { jobPath, request } from "./api.js";
import { colours, onThemeChange } from "./theme.js";
import { number, plural, seconds, unitOf, words } from "./format.js";
import { anomalies, lastValue, positions, shares, smooth, stepAt } from "./columns.js";
import { plot } from "./plot.js";
import { bands } from "./bands.js";
import { mergedMetrics, metricTraces, namesOf, SHARE } from "./metric_curves.js";

const ROWS = [
  ["loss", 0.26],
  ["tokens/s", 0.13],
  ["gradient norm", 0.13],
  ["learning rate", 0.09],
  ["world size", 0.12],
  ["goodput", 0.15],
  ["incidents", 0.06],
];
const GAP = 0.01;
const PAUSE_MS = 700;
const HEIGHT = 1080;

export class Curves {
  constructor(id, shown) {
    this.id = id;
    this.shown = shown;
    this.timer = null;
    this.drawn = 0;
    this.detail = null;
    for (const name of ["axis", "log"])
      $(name).addEventListener("change", () => {
        this.detail = null;
        this.draw(true);
      });
    $("smoothing").addEventListener("input", () => this.draw(true));
    document.addEventListener("visibilitychange", () => this.draw());
    onThemeChange(() => this.draw(true));
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
    const isEmpty = !this.shown.series.step.length;
    $("uncurved").hidden = !isEmpty;
    $("curves").hidden = isEmpty;
    if (isEmpty) return;
    const axis = $("axis").value,
      colour = colours();
    const series = this.detail ? merged(this.shown.series, this.detail) : this.shown.series;
    const { status } = this.shown.job;
    const tokens = status.step && status.tokens ? status.tokens / status.step : 1;
    const x = (columns) => positions(axis, columns, tokens);
    const when = (at) =>
      axis === "time" ? new Date(at * 1000) : stepAt(series, at) * (axis === "tokens" ? tokens : 1);
    const names = namesOf(series),
      weight = Number($("smoothing").value);
    const traces = [
      ...this.values(series, x(series), colour),
      ...metricTraces(series, names, x(series), weight, colour, (place) => axisName(ROWS.length + place)),
      ...this.accounts(x(this.shown.samples), colour),
      incidents(this.shown.incidents, when, colour),
    ];
    plot(
      "curves",
      traces,
      this.layout(axis, bands(this.shown, when), colour, names, unitOf(this.shown.job), series),
    ).then((chart) => this.listen(chart));
  }

  renderLoss() {
    const { series } = this.shown,
      colour = colours(),
      axes = { gridcolor: colour.line, zeroline: false };
    const isEmpty = ($("loss-card").hidden = series.loss.every((value) => value === null));
    if (isEmpty) return;
    const traces = this.values(series, series.step, colour).filter((trace) => trace.yaxis === axisName(0));
    plot("loss-chart", traces, {
      height: 240,
      showlegend: false,
      hovermode: "x",
      xaxis: { ...axes, title: { text: "step" } },
      yaxis: { ...axes, type: $("log").checked ? "log" : "linear" },
    });
  }

  values(series, x, colour) {
    const weight = Number($("smoothing").value);
    const line = (row, name, y, ink, more = {}) => ({
      type: "scatter",
      mode: "lines",
      name,
      x,
      y,
      yaxis: axisName(row),
      line: { color: ink, width: 1.6 },
      hovertemplate: "%{y:.5g}",
      ...more,
    });
    const faint = weight
      ? [line(0, "loss, not smoothed", series.loss, colour.run, { opacity: 0.25, hoverinfo: "skip" })]
      : [];
    return [
      ...faint,
      line(0, "loss", smooth(series.loss, weight), colour.run),
      line(0, "validation", series.val_loss, colour.warn, {
        mode: "lines+markers",
        connectgaps: true,
        marker: { size: 4 },
      }),
      line(1, "tokens/s", smooth(series.tokens_per_s, weight), colour.accent),
      line(2, "gradient norm", smooth(series.grad_norm, weight), colour.purple),
      line(3, "learning rate", series.lr, colour.blue),
      ...this.marks(0, series.loss, x, colour),
      ...this.marks(2, series.grad_norm, x, colour),
    ];
  }

  // Where a value is not finite, and where it is far above those before it. A script may leave steps out, so it has no gaps.
  marks(row, values, x, colour) {
    const { gaps, spikes } = anomalies(values);
    const mark = (name, symbol, indexes) =>
      indexes.length
        ? [
            {
              type: "scatter",
              mode: "markers",
              name,
              x: indexes.map((index) => x[index]),
              y: indexes.map((index) => values[index] ?? lastValue(values, index)),
              yaxis: axisName(row),
              marker: { symbol, size: 9, color: colour.bad },
              hovertemplate: `${name}<extra></extra>`,
            },
          ]
        : [];
    return [
      ...mark("not finite", "x", this.shown.job.spec.script ? [] : gaps),
      ...mark("spike: %{y:.5g}", "triangle-up-open", spikes),
    ];
  }

  accounts(x, colour) {
    const { samples } = this.shown;
    const stair = (name, y, ink, dash) => ({
      type: "scatter",
      mode: "lines",
      name,
      x,
      y,
      yaxis: axisName(4),
      line: { color: ink, shape: "hv", width: 1.6, dash },
      hovertemplate: "%{y}",
    });
    const style = getComputedStyle($("categories"));
    const areas = Object.entries(shares(samples)).map(([name, y]) => ({
      type: "scatter",
      mode: "lines",
      name: words(name),
      x,
      y,
      yaxis: axisName(5),
      stackgroup: "goodput",
      line: { width: 0, shape: "vh", color: partColour(name, style) },
      hovertemplate: "%{y:.0%}",
    }));
    return [
      stair("wanted", samples.wanted, colour.dim, "dot"),
      stair("granted", samples.granted, colour.warn, "dash"),
      stair("had", samples.workers, colour.done),
      ...areas,
    ];
  }

  layout(axis, { shapes, labels }, colour, names, unit, series) {
    const whole = 1 + names.length * (SHARE + GAP),
      rows = [
        ...ROWS.map(([title, share], index) => [
          `${title.replace("tokens", unit)}${isSilent(series, index) ? "<br>not reported" : ""}`,
          share,
        ]),
        ...names.map((name) => [name, SHARE]),
      ];
    const layout = {
      height: HEIGHT * whole,
      margin: { l: 58, r: 12, t: 24, b: 40 },
      showlegend: false,
      hovermode: "x",
      hoversubplots: "axis",
      hoverlabel: { font: { size: 11 }, namelength: -1 },
      dragmode: "zoom",
      uirevision: axis,
      shapes,
      annotations: labels,
      xaxis: {
        title: { text: axis === "time" ? "" : axis.replace("tokens", unit) },
        anchor: axisName(rows.length - 1),
        gridcolor: colour.line,
        zeroline: false,
        showspikes: true,
        spikemode: "across",
        spikesnap: "cursor",
        spikethickness: 1,
        spikecolor: colour.dim,
        spikedash: "solid",
        ...(axis === "time" ? { type: "date" } : {}),
      },
    };
    let top = 1;
    rows.forEach(([title, share], index) => {
      const log = $("log").checked && (index === 0 || index === 2);
      layout[`yaxis${index ? index + 1 : ""}`] = {
        domain: [Math.max(0, top - share / whole), top],
        title: { text: title, font: { size: 10 } },
        gridcolor: colour.line,
        zeroline: false,
        type: log ? "log" : "linear",
        fixedrange: index >= 4 && index < ROWS.length,
        ...(index === 4 ? { rangemode: "tozero" } : {}),
        ...(index === 5 ? { range: [0, 1], tickformat: ".0%" } : {}),
        ...(index === 6 ? { range: [0, 1], showticklabels: false, showgrid: false } : {}),
      };
      top -= (share + GAP) / whole;
    });
    return layout;
  }

  // Zoomed in, finer points of that range are asked for; the stream goes on beside them.
  listen(chart) {
    if (this.listening) return;
    this.listening = true;
    chart.on("plotly_relayout", async (change) => {
      if (change["xaxis.autorange"]) {
        this.detail = null;
        this.draw(true);
        return;
      }
      const from = change["xaxis.range[0]"],
        to = change["xaxis.range[1]"];
      if (from === undefined || $("axis").value !== "step") return;
      const [after, until] = [Math.max(0, Math.floor(from) - 1), Math.max(1, Math.ceil(to))];
      const { items } = await request(
        `${jobPath(this.id)}/series?after_step=${after}&until_step=${until}&max_points=1000`,
      );
      this.detail = items;
      this.draw(true);
    });
  }
}

// A script may not report what a row shows.
const COLUMNS = ["loss", "tokens_per_s", "grad_norm", "lr"];
const isSilent = (series, row) => row < COLUMNS.length && series[COLUMNS[row]].every((value) => value === null);
const axisName = (row) => (row ? `y${row + 1}` : "y");
const partColour = (name, style) => {
  const probe = document.createElement("span");
  probe.className = name;
  document.body.append(probe);
  const found = getComputedStyle(probe).getPropertyValue("--part").trim();
  probe.remove();
  return found || style.color;
};

function merged(series, items) {
  if (!items.length) return series;
  const [first, last] = [items[0].step, items[items.length - 1].step];
  const before = series.step.findIndex((step) => step >= first),
    cut = before < 0 ? series.step.length : before;
  const after = series.step.findIndex((step) => step > last),
    rest = after < 0 ? series.step.length : after;
  return Object.fromEntries(
    Object.keys(series).map((name) => [
      name,
      name.endsWith("metrics")
        ? mergedMetrics(series, items, name, cut, rest)
        : [...series[name].slice(0, cut), ...items.map((one) => one[name] ?? null), ...series[name].slice(rest)],
    ]),
  );
}

function incidents(all, when, colour) {
  const text = all.map((one) =>
    [
      words(one.cause),
      one.ranks.length ? `rank ${one.ranks.join(", ")}` : "",
      `${one.from_layout || one.from_workers} → ${one.to_layout ?? one.to_workers ?? "…"}`,
      `recovery ${seconds(one.recovery_s)}`,
      `${plural(one.steps_lost, "step")} lost`,
      one.state_source ? `state from ${one.state_source}` : "",
    ]
      .filter(Boolean)
      .join("<br>"),
  );
  return {
    type: "scatter",
    mode: "markers",
    name: "incident",
    x: all.map((one) => when(one.at)),
    y: all.map(() => 0.5),
    yaxis: axisName(6),
    text,
    hovertemplate: "%{text}",
    marker: { symbol: "diamond", size: 11, color: all.map((one) => (one.closed ? colour.bad : colour.warn)) },
  };
}
