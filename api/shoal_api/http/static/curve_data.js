// Curves of jobs: as typed arrays, whose gaps are NaN, they are unpacked, placed on an axis, smoothed, and put together by groups; as
// columns of plain values they grow with a stream. Pure; what is made of a typed curve is kept with it until the curve is replaced.
const GRID = 240; // points of the curve of a group
const isMissing = (value) => value === null || value !== value;

function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const raw = atob(text),
    made = new Uint8Array(raw.length);
  for (let at = 0; at < raw.length; at += 1) made[at] = raw.charCodeAt(at);
  return made;
}

export function unpack(curve) {
  const values = Object.fromEntries(
    Object.entries(curve.values).map(([name, text]) => [name, new Float32Array(bytesOf(text).buffer)]),
  );
  return {
    step: new Float64Array(bytesOf(curve.step).buffer),
    at: new Float64Array(bytesOf(curve.at).buffer),
    values,
    made: new Map(),
  };
}

const kept = (curve, key, make) => {
  if (!curve.made.has(key)) curve.made.set(key, make());
  return curve.made.get(key);
};

const AXES = ["step", "time", "tokens", "samples"];
export const isMetricAxis = (axis) => !AXES.includes(axis);

// Points in the order of their positions: over a metric a curve may go back and forth.
export function ordered({ xs, ys }) {
  const order = [...xs.keys()].filter((at) => xs[at] === xs[at]).sort((a, b) => xs[a] - xs[b]);
  return { xs: Float64Array.from(order, (at) => xs[at]), ys: Float32Array.from(order, (at) => ys[at]) };
}

// Positions of a job's points: steps, seconds since its start, tokens, samples or a metric; null: the job does not say.
export function positions(job, curve, axis) {
  if (axis === "step") return curve.step;
  if (isMetricAxis(axis)) return curve.values[axis] ?? null;
  const factor = axis === "time" ? 1 : axis === "tokens" ? job.tokens_per_step : job.samples_per_step;
  if (!factor) return null;
  const start = job.started_at ?? job.created_at;
  return kept(curve, `${axis} ${factor}`, () =>
    axis === "time" ? curve.at.map((at) => at - start) : curve.step.map((step) => step * factor),
  );
}

// Smoothed values, kept with the curve.
export function smoothed(curve, metric, weight) {
  const values = curve.values[metric];
  return values && weight ? kept(curve, `${metric} ${weight}`, () => smooth(values, weight)) : values;
}

// The first index whose position is not below `x`.
export function indexAt(xs, x) {
  let low = 0,
    high = xs.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The value of a curve at a position between two of its points; NaN outside of it.
export function valueAt(xs, ys, x) {
  let right = indexAt(xs, x),
    left = right - 1;
  if (xs[right] === x && ys[right] === ys[right]) return ys[right];
  while (left >= 0 && ys[left] !== ys[left]) left -= 1;
  while (right < xs.length && ys[right] !== ys[right]) right += 1;
  if (left < 0 || right >= xs.length) return NaN;
  return ys[left] + ((ys[right] - ys[left]) * (x - xs[left])) / (xs[right] - xs[left]);
}

// The position nearest to `x` at which a curve has a value.
export function nearestPoint({ xs, ys }, x) {
  let best = NaN;
  for (let at = Math.max(0, indexAt(xs, x) - 1); at < xs.length; at += 1) {
    if (ys[at] !== ys[at]) continue;
    if (!(Math.abs(xs[at] - x) >= Math.abs(best - x))) best = xs[at];
    if (xs[at] >= x) break;
  }
  return best === best ? best : x;
}

// Mean of several curves [{ xs, ys }] and the band around it, at positions between the first and the last point of any.
// band: "min_max", "std" (of the sample), "std_error" or "none"; "median": the median instead of the mean, and the quartiles.
// The squares are summed as Welford (1962) does.
export function together(curves, band = "min_max") {
  const whole = curves.filter(({ xs }) => xs.length);
  const low = Math.min(...whole.map(({ xs }) => xs[0])),
    high = Math.max(...whole.map(({ xs }) => xs[xs.length - 1]));
  const num = whole.length ? (high > low ? GRID : 1) : 0;
  const xs = new Float64Array(num),
    mean = new Float32Array(num),
    least = new Float32Array(num),
    most = new Float32Array(num);
  for (let at = 0; at < num; at += 1) {
    const x = (xs[at] = num > 1 ? low + ((high - low) * at) / (num - 1) : low);
    let average = 0,
      squares = 0,
      count = 0,
      smallest = Infinity,
      largest = -Infinity;
    const all = [];
    for (const curve of whole) {
      const value = valueAt(curve.xs, curve.ys, x);
      if (value !== value) continue;
      if (band === "median") all.push(value);
      const before = value - average;
      count += 1;
      average += before / count;
      squares += before * (value - average);
      smallest = Math.min(smallest, value);
      largest = Math.max(largest, value);
    }
    if (all.length) {
      all.sort((a, b) => a - b);
      least[at] = quantile(all, 0.25);
      mean[at] = quantile(all, 0.5);
      most[at] = quantile(all, 0.75);
      continue;
    }
    const away =
        band === "none" || count < 2
          ? 0
          : Math.sqrt(squares / (count - 1)) / (band === "std_error" ? Math.sqrt(count) : 1),
      isRange = band === "min_max";
    mean[at] = count ? average : NaN;
    least[at] = count ? (isRange ? smallest : average - away) : NaN;
    most[at] = count ? (isRange ? largest : average + away) : NaN;
  }
  return { xs, ys: mean, least, most };
}

// Of numbers in their order; between two of them a part of their difference, as NumPy does by default.
export function quantile(sorted, share) {
  const at = share * (sorted.length - 1),
    low = Math.floor(at);
  return sorted[low] + (sorted[Math.ceil(at)] - sorted[low]) * (at - low);
}

// Histories as columns of equal length, whose gaps are null: parts of a stream are put together.
// `key` ascends. A part that begins before the end of what is known replaces the rest: those steps were computed again.
export function append(known, { replace, columns }, key) {
  if (replace || !known) return columns;
  if (!columns[key].length) return known;
  const first = columns[key][0];
  let kept = known[key].length;
  while (kept && known[key][kept - 1] >= first) kept -= 1;
  return splice(known, columns, kept, columns[key].length, 0, 0);
}

// Columns between whose first and last values, `head` and `tail` of them, others are put; a column that is missing has gaps there.
function splice(known, columns, head, num, tail, gap) {
  return Object.fromEntries(
    Object.keys({ ...known, ...columns }).map((name) => {
      const before = known[name],
        after = columns[name];
      if (!Array.isArray(before ?? after))
        return [name, splice(before ?? {}, after ?? {}, head, num, tail, name === "seconds" ? 0 : null)];
      const all = before ?? Array(head + tail).fill(gap);
      return [name, [...all.slice(0, head), ...(after ?? Array(num).fill(gap)), ...all.slice(all.length - tail)]];
    }),
  );
}

// A series in which these points stand for those of the same steps.
export function refined(series, points) {
  if (!points.length) return series;
  const columnsOf = (parts, names) =>
    Object.fromEntries(names.map((name) => [name, parts.map((part) => part[name] ?? null)]));
  const columns = columnsOf(points, Object.keys(series));
  for (const kind of OF_THE_TASK) {
    const parts = points.map((point) => point[kind] ?? {});
    columns[kind] = columnsOf(parts, Object.keys(Object.assign({}, ...parts)));
  }
  const tail = series.step.length - indexAt(series.step, points.at(-1).step + 1);
  return splice(series, columns, indexAt(series.step, points[0].step), points.length, tail, null);
}

// Exponential moving average that starts at the first value; gaps stay gaps.
export function smooth(values, weight) {
  if (!weight) return values;
  let mean = 0,
    norm = 0;
  return values.map((value) => {
    if (isMissing(value)) return value;
    mean = mean * weight + (1 - weight) * value;
    norm = norm * weight + (1 - weight);
    return mean / norm;
  });
}

// Positions on the axis that was chosen, which may be a metric. A step takes the same number of tokens at every world size.
export function places(axis, columns, tokensPerStep) {
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
export const stepAt = (series, at) => series.step[Math.min(indexAt(series.at, at), series.step.length - 1)] ?? 0;

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
