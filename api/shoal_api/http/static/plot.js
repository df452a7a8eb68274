// Charts of Plotly, as all pages draw them. Its button that sends a chart to a server of Plotly's is left out, and so is the address.
import { $ } from "./dom.js";
import { keep, kept } from "./address.js";
import { describeKeys } from "./keys.js";
import { colours } from "./looks.js";

const CONFIG = {
  responsive: true,
  displaylogo: false,
  showSendToCloud: false,
  plotlyServerURL: "",
  modeBarButtonsToRemove: ["sendChartToCloud", "select2d", "lasso2d"],
};
const GAP = 0.01; // between rows
describeKeys("drag, double-click", "with the pointer in a chart: zoom, and the whole axis again");

export function plot(id, traces, layout, size = 11) {
  const { ink, dim, accent } = colours(),
    clear = "rgba(0,0,0,0)";
  const look = {
    margin: { l: 58, r: 12, t: 10, b: 40 },
    paper_bgcolor: clear,
    plot_bgcolor: clear,
    font: { color: ink, size },
    modebar: { bgcolor: clear, color: dim, activecolor: accent },
    showlegend: false,
  };
  $(id).style.height = `${layout.height}px`; // Plotly takes its part of it away with a resize, and what follows would lie under the chart
  return window.Plotly.react(
    $(id),
    traces.map(dotted),
    { ...look, ...layout },
    { ...CONFIG, displayModeBar: innerWidth > 640 ? "hover" : false },
  );
}

export const axisName = (row) => (row ? `y${row + 1}` : "y");

// A curve in a row of `stacked`; `more`: other attributes of Plotly's, of which `line` completes its line.
export const curve = (row, name, x, y, color, { line, ...more } = {}) => ({
  type: "scatter",
  mode: "lines",
  name,
  x,
  y,
  yaxis: axisName(row),
  line: { color, width: 1.6, ...line },
  hovertemplate: "%{y:.5g}",
  ...more,
});
// Single points in a row, which say `hover` under the pointer.
export const markers = (row, name, x, y, marker, hover, more = {}) => ({
  type: "scatter",
  mode: "markers",
  name,
  x,
  y,
  yaxis: axisName(row),
  marker,
  hovertemplate: hover,
  ...more,
});
export const DOTTED = { mode: "lines+markers", connectgaps: true, marker: { size: 4 } };

export const grid = () => ({ gridcolor: colours().line, zeroline: false });

// The layout of rows over one x axis, whose crosshair and zoom they share. rows: [title, share of `height`, more of its axis].
export function stacked(rows, axis, height, more = {}) {
  const whole = rows.reduce((sum, [, share]) => sum + share + GAP, 0),
    range = kept("zoom")?.split(",");
  const layout = {
    height: height * whole,
    hovermode: "x",
    hoversubplots: "axis",
    hoverlabel: { font: { size: 11 }, namelength: -1 },
    dragmode: "zoom",
    ...more,
    xaxis: {
      ...grid(),
      anchor: axisName(rows.length - 1),
      showspikes: true,
      spikemode: "across",
      spikesnap: "cursor",
      spikethickness: 1,
      spikecolor: colours().dim,
      spikedash: "solid",
      ...(range ? { range: axis.type === "date" ? range : range.map(Number) } : {}),
      ...axis,
    },
  };
  let top = 1;
  rows.forEach(([title, share, axisMore], row) => {
    layout[`yaxis${row ? row + 1 : ""}`] = {
      ...grid(),
      domain: [Math.max(0, top - share / whole), top],
      title: { text: title, font: { size: 10 } },
      ...axisMore,
    };
    top -= (share + GAP) / whole;
  });
  return layout;
}

// The address keeps the zoom of a chart; zoomed([from, to]), or zoomed(null) for the whole axis.
export function followZoom(chart, zoomed) {
  if (chart.dataset.followed) return;
  chart.dataset.followed = "1";
  chart.on("plotly_relayout", (change) => {
    const [from, to] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    if (from === undefined && !change["xaxis.autorange"]) return;
    keep("zoom", from === undefined ? "" : `${from},${to}`);
    zoomed(from === undefined ? null : [from, to]);
  });
}

// A line needs two points: one that has no neighbour gets a marker, or it would not be seen.
function dotted(trace) {
  if (trace.mode !== "lines" || trace.stackgroup) return trace;
  const isPoint = (index) => trace.y[index] !== null && trace.y[index] !== undefined && !Number.isNaN(trace.y[index]);
  const points = [...trace.y.keys()].filter(isPoint);
  const alone = new Set(
    points.filter((index) => (trace.connectgaps ? points.length === 1 : !isPoint(index - 1) && !isPoint(index + 1))),
  );
  const sizes = [...trace.y.keys()].map((index) => (alone.has(index) ? 5 : 0));
  return alone.size ? { ...trace, mode: "lines+markers", marker: { size: sizes } } : trace;
}
