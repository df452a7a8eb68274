// Ticks of an axis and their words. Pure.
const STEPS = [1, 2, 2.5, 5, 10];

// At most about `num` values from `low` to `high`; powers of ten if the axis is logarithmic and long enough.
export function ticks(low, high, num, isLog) {
  if (!(high > low)) return [low];
  if (isLog && high - low >= 1.5) {
    const every = Math.max(1, Math.ceil((high - low) / num)),
      made = [];
    for (let power = Math.ceil(low); power <= high; power += every) made.push(power);
    return made;
  }
  const from = isLog ? 10 ** low : low,
    to = isLog ? 10 ** high : high,
    rough = (to - from) / num,
    power = 10 ** Math.floor(Math.log10(rough));
  const step = power * STEPS.find((one) => one * power >= rough * 0.999),
    made = [];
  for (let at = Math.ceil(from / step - 1e-9); at * step <= to + step * 1e-9; at += 1)
    made.push(isLog ? Math.log10(at * step) : at * step);
  return made.filter(Number.isFinite);
}

export function short(value) {
  const size = Math.abs(value);
  if (size >= 1e15 || (size && size < 5e-3)) return Number(value.toPrecision(4)).toExponential().replace("e+", "e");
  for (const [unit, word] of [
    [1e12, "T"],
    [1e9, "G"],
    [1e6, "M"],
    [1e4, "k"],
  ])
    if (size >= unit) return `${Number((value / (unit === 1e4 ? 1e3 : unit)).toPrecision(4))}${word}`;
  return String(Number(value.toPrecision(4)));
}

// Seconds of an axis of time.
export function duration(value) {
  const [unit, word] =
    Math.abs(value) >= 172800
      ? [86400, "d"]
      : Math.abs(value) >= 7200
        ? [3600, "h"]
        : Math.abs(value) >= 180
          ? [60, "min"]
          : [1, "s"];
  return `${short(value / unit)} ${word}`;
}
