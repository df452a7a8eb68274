// Histories as columns of equal length: parts of a stream are put together, and values are smoothed. Pure.

// `key` ascends. A part that begins before the end of what is known replaces the rest: those steps were computed again.
export function append(known, { replace, columns }, key) {
  if (replace || !known) return columns;
  if (!columns[key].length) return known;
  const first = columns[key][0];
  let kept = known[key].length;
  while (kept && known[key][kept - 1] >= first) kept -= 1;
  return join(known, columns, kept, columns[key].length);
}

function join(known, columns, kept, added, gap = 0) {
  return Object.fromEntries(
    Object.keys({ ...known, ...columns }).map((name) => {
      const before = known[name],
        after = columns[name];
      if (!Array.isArray(before ?? after))
        return [name, join(before ?? {}, after ?? {}, kept, added, name === "seconds" ? 0 : null)];
      return [
        name,
        [...(before ? before.slice(0, kept) : Array(kept).fill(gap)), ...(after ?? Array(added).fill(gap))],
      ];
    }),
  );
}

// Exponential moving average that starts at the first value; gaps stay gaps.
export function smooth(values, weight) {
  if (!weight) return values;
  let mean = null,
    norm = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = (mean ?? 0) * weight + (1 - weight) * value;
    norm = norm * weight + (1 - weight);
    return mean / norm;
  });
}

// Positions on the axis that was chosen, which may be a metric. A step takes the same number of tokens at every world size.
export function positions(axis, columns, tokensPerStep) {
  if (axis === "time") return columns.at.map((at) => new Date(at * 1000));
  return axis === "tokens" ? columns.step.map((step) => step * tokensPerStep) : columnOf(columns, axis);
}

const OF_THE_TASK = ["metrics", "val_metrics"];

// A column by its name; those of the task's metrics are "metrics.NAME" and "val_metrics.NAME".
export function columnOf(series, name) {
  const [kind, ...rest] = name.split(".");
  return (rest.length ? series[kind]?.[rest.join(".")] : series[name]) ?? [];
}

// The names of the columns that have a value, of those given and of the task's metrics.
export const columnsWithValues = (series, plain) =>
  [...plain, ...OF_THE_TASK.flatMap((kind) => Object.keys(series[kind]).map((name) => `${kind}.${name}`))].filter(
    (name) => columnOf(series, name).some((value) => !isMissing(value)),
  );

export const wordsOfColumn = (name) => name.replace(/^val_metrics\./, "validation ").replace(/^metrics\./, "");

// The step after which something happened, from the series.
export function stepAt(series, at) {
  let low = 0,
    high = series.at.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (series.at[middle] < at) low = middle + 1;
    else high = middle;
  }
  return series.step[Math.min(low, series.step.length - 1)] ?? 0;
}

// Shares of the worker-seconds of each interval between two samples, by category.
export function shares(samples) {
  const names = Object.keys(samples.seconds);
  const totals = samples.at.map((_, index) =>
    names.reduce((sum, name) => sum + samples.seconds[name][index] - (index ? samples.seconds[name][index - 1] : 0), 0),
  );
  return Object.fromEntries(
    names.map((name) => [
      name,
      samples.seconds[name].map((value, index) =>
        totals[index] > 0 ? Math.max(0, (value - (index ? samples.seconds[name][index - 1] : 0)) / totals[index]) : 0,
      ),
    ]),
  );
}

const BEFORE = 20,
  FEWEST = 5,
  FAR = 3;

const isMissing = (value) => value === null || value !== value;

export function lastValue(values, index) {
  let at = index;
  while (at >= 0 && isMissing(values[at])) at -= 1;
  return values[at] ?? null;
}

// Indexes of the first of each run of values that are missing after a value, and of values above FAR times the median before them.
export function anomalies(values) {
  const gaps = [],
    spikes = [];
  values.forEach((value, index) => {
    if (isMissing(value)) {
      if (index && !isMissing(values[index - 1])) gaps.push(index);
      return;
    }
    const before = values
      .slice(Math.max(0, index - BEFORE), index)
      .filter((one) => !isMissing(one))
      .sort((a, b) => a - b);
    if (before.length >= FEWEST && before[0] > 0 && value > FAR * before[before.length >> 1]) spikes.push(index);
  });
  return { gaps, spikes };
}
