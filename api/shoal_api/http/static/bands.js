// Generations as bands behind the curves, resizes and incidents as lines through all of them.
import { colours } from "./theme.js";

export function bands({ events, incidents, job }, when) {
  const colour = colours();
  const formed = events.filter((one) => one.type === "generation.formed");
  const shapes = [],
    labels = [];
  formed.forEach((one, index) => {
    const end = formed[index + 1]?.at ?? job.updated_at;
    if (index % 2)
      shapes.push({
        type: "rect",
        xref: "x",
        yref: "paper",
        x0: when(one.at),
        x1: when(end),
        y0: 0,
        y1: 1,
        fillcolor: colour.ink,
        opacity: 0.05,
        line: { width: 0 },
        layer: "below",
      });
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

const line = (x, color, dash) => ({
  type: "line",
  xref: "x",
  yref: "paper",
  x0: x,
  x1: x,
  y0: 0,
  y1: 1,
  line: { color, dash, width: 1.2 },
});
