// Metrics of the task's own: a row of the chart for each name, training and validation in one. Pure, but for colours.
import { smooth } from "./columns.js";

export const SHARE = 0.13;

export const namesOf = (series) =>
  [...new Set([...Object.keys(series.metrics), ...Object.keys(series.val_metrics)])].sort();

// `axisOf(place)`: the axis of the row of the metric at this place among the names.
export function metricTraces(series, names, x, weight, colour, axisOf) {
  return names.flatMap((name, place) => {
    const line = (title, y, ink, more = {}) => ({
      type: "scatter",
      mode: "lines",
      name: title,
      x,
      y,
      yaxis: axisOf(place),
      connectgaps: true,
      line: { color: ink, width: 1.6 },
      hovertemplate: "%{y:.5g}",
      ...more,
    });
    const { [name]: trained } = series.metrics,
      { [name]: validated } = series.val_metrics;
    return [
      ...(trained ? [line(name, smooth(trained, weight), colour.run)] : []),
      ...(validated
        ? [line(`${name}, validation`, validated, colour.warn, { mode: "lines+markers", marker: { size: 4 } })]
        : []),
    ];
  });
}

// A part of the columns is replaced by points of a series; names that only one of them has are null in the other.
export function mergedMetrics(series, items, field, cut, rest) {
  const columns = series[field],
    names = new Set([...Object.keys(columns), ...items.flatMap((one) => Object.keys(one[field] ?? {}))]);
  const part = (name, from, to) => (columns[name] ?? Array(series.step.length).fill(null)).slice(from, to);
  return Object.fromEntries(
    [...names].map((name) => [
      name,
      [...part(name, 0, cut), ...items.map((one) => one[field]?.[name] ?? null), ...part(name, rest)],
    ]),
  );
}
