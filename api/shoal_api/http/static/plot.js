// Charts of Plotly, as all pages draw them. Its button that sends a chart to a server of Plotly's is left out, and so is the address.
import { $ } from "./dom.js";
import { colours } from "./theme.js";

const CONFIG = {
  responsive: true,
  displaylogo: false,
  showSendToCloud: false,
  plotlyServerURL: "",
  modeBarButtonsToRemove: ["sendChartToCloud", "select2d", "lasso2d"],
};

export function plot(id, traces, layout, size = 11) {
  const { ink, dim, accent } = colours(),
    clear = "rgba(0,0,0,0)";
  const look = {
    margin: { l: 58, r: 12, t: 10, b: 40 },
    paper_bgcolor: clear,
    plot_bgcolor: clear,
    font: { color: ink, size },
    modebar: { bgcolor: clear, color: dim, activecolor: accent },
  };
  $(id).style.height = `${layout.height}px`; // Plotly takes its part of it away with a resize, and what follows would lie under the chart
  return window.Plotly.react(
    $(id),
    traces.map(dotted),
    { ...look, ...layout },
    { ...CONFIG, displayModeBar: innerWidth > 640 ? "hover" : false },
  );
}

// A line needs two points: one that has no neighbour gets a marker, or it would not be seen.
function dotted(trace) {
  if (trace.mode !== "lines" || trace.stackgroup) return trace;
  const isPoint = (index) => trace.y[index] !== null && trace.y[index] !== undefined && !Number.isNaN(trace.y[index]);
  const points = [...trace.y.keys()].filter(isPoint);
  const alone = new Set(
    points.filter((index) => (trace.connectgaps ? points.length === 1 : !isPoint(index - 1) && !isPoint(index + 1))),
  );
  return alone.size
    ? {
        ...trace,
        mode: "lines+markers",
        marker: { size: [...trace.y.keys()].map((index) => (alone.has(index) ? 5 : 0)) },
      }
    : trace;
}
