// A curve without axes for a table cell: one line of a few points. Charts that one reads values from are Plotly's.
import { picture, svg } from "./dom.js";

export function spark(values, name, { steps = false } = {}) {
  const known = values.filter((value) => value !== null);
  if (!known.length) return "";
  const low = steps ? 0 : Math.min(...known),
    high = Math.max(...known);
  const x = (index) => (100 * index) / Math.max(1, values.length - 1),
    y = (value) => 22 - 20 * (high === low ? 0.5 : (value - low) / (high - low));
  const points = values.flatMap((value, index) =>
    value === null
      ? []
      : steps && index
        ? [`${x(index)},${y(values[index - 1] ?? value)}`, `${x(index)},${y(value)}`]
        : [`${x(index)},${y(value)}`],
  );
  const line = svg("polyline", {
    points: (points.length > 1 ? points : [points, points].flat()).join(" "),
    class: steps ? "steps" : "",
  });
  return picture(100, 24, `${name} from ${known[0]} to ${known[known.length - 1]}`, [line], { class: "spark" });
}
