// Curves of jobs as typed arrays: unpacked, placed on an axis, smoothed, and put together by groups. Pure; what is made of a
// curve is kept with it until the curve is replaced.
const GRID = 240; // points of the curve of a group

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

// Exponential moving average that starts at the first value; gaps stay gaps.
export function smoothed(curve, metric, weight) {
  const values = curve.values[metric];
  if (!values || !weight) return values;
  return kept(curve, `${metric} ${weight}`, () => {
    const made = new Float32Array(values.length);
    let mean = 0,
      norm = 0;
    for (let at = 0; at < values.length; at += 1) {
      const value = values[at];
      if (value !== value) {
        made[at] = value;
        continue;
      }
      mean = mean * weight + (1 - weight) * value;
      norm = norm * weight + (1 - weight);
      made[at] = mean / norm;
    }
    return made;
  });
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
