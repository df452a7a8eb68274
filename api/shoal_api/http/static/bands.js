// Generations as bands behind the curves, resizes and incidents as lines through all of them.
import { colours } from "./theme.js";

export function bands({ events, incidents, job }, when) {
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
