// Metrics of the task's own: a row of the chart for each name, training and validation in one. Pure, but for colours.
import { smooth } from "./columns.js";
import { curve, DOTTED } from "./plot.js";

export const SHARE = 0.13;

export const namesOf = (series) =>
  [...new Set([...Object.keys(series.metrics), ...Object.keys(series.val_metrics)])].sort();

// first: the row of the first metric in the chart.
export function metricTraces(series, names, x, weight, colour, first) {
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
