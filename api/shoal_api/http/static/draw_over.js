// What a panel draws besides its curves: grid lines and numbers, the band around the mean of a group, marks, and names at the ends of curves.
import { short, ticks } from "./axes.js";
import { anomalies, lastValue } from "./curve_data.js";

// The band around the mean of a group. Where it goes below zero, a logarithmic axis shows it down to its end.
export function drawBand(pen, { xs, least, most, colour, from, to }) {
  const { logY } = pen.view;
  const fits = (at) => most[at] === most[at] && (!logY || most[at] > 0),
    low = (at) => (logY && !(least[at] > 0) ? pen.bottom : pen.y(least[at]));
  pen.shade(colour, () => {
    for (let at = from; at < to; at += 1) if (fits(at)) pen.context.lineTo(pen.x(xs[at]), pen.y(most[at]));
    for (let at = to - 1; at >= from; at -= 1) if (fits(at)) pen.context.lineTo(pen.x(xs[at]), low(at));
  });
}

// A triangle at a value far above those before it, and a cross at the last one before the rest is not finite.
export function drawMarks(pen, { xs, ys, from, to }, colour) {
  const { gaps, spikes } = anomalies(ys.subarray(0, to)),
    last = gaps.at(-1),
    isOver = last !== undefined && ys.subarray(last, to).every((value) => value !== value);
  const at = (index, value) => [pen.x(xs[index]), pen.y(value)],
    size = 4 * pen.ratio;
  pen.stroke(colour, 1.5 * pen.ratio, () => {
    for (const index of spikes.filter((one) => one >= from)) {
      const [x, y] = at(index, ys[index]);
      pen.segment(x - size, y + size, x, y - size);
      pen.context.lineTo(x + size, y + size);
      pen.context.closePath();
    }
    if (!isOver) return;
    const [x, y] = at(last - 1, lastValue(ys, last - 1));
    pen.segment(x - size, y - size, x + size, y + size);
    pen.segment(x - size, y + size, x + size, y - size);
  });
}

// Names where they do not cover each other, from the top; the others are read with the pointer.
export function drawNames(pen, lines, background) {
  const { context, ratio } = pen;
  const ends = lines.flatMap(({ name, colour, xs, ys, from, to }) => {
    let last = to - 1;
    while (last >= from && ys[last] !== ys[last]) last -= 1;
    return last < from ? [] : [{ name, colour, x: pen.x(xs[last]), y: pen.y(ys[last]) }];
  });
  let free = -Infinity;
  context.strokeStyle = background;
  context.lineWidth = 3 * ratio;
  for (const { name, colour, x, y } of ends.sort((a, b) => a.y - b.y)) {
    if (y < free || y < pen.top || y > pen.bottom) continue;
    free = y + 12 * ratio;
    const text = name.length > 16 ? `${name.slice(0, 15)}…` : name,
      fits = x + context.measureText(text).width + 4 * ratio < pen.right,
      left = Math.min(x, pen.right) + (fits ? 4 : -4) * ratio;
    pen.text(text, left, y, { colour, align: fits ? "left" : "right", halo: true });
  }
}

export function drawGrid(pen, colour, wordsOfX = short) {
  const { left, top, right, bottom, width, height, ratio, view } = pen,
    { logX, logY } = view;
  const xs = ticks(view.x0, view.x1, Math.max(2, width / (90 * ratio)), logX).map((x) => (logX ? 10 ** x : x)),
    ys = ticks(view.y0, view.y1, Math.max(2, height / (36 * ratio)), logY).map((y) => (logY ? 10 ** y : y));
  pen.context.globalAlpha = 0.7;
  pen.stroke(colour.line, 1, () => {
    for (const x of xs) pen.segment(pen.x(x), top, pen.x(x), bottom);
    for (const y of ys) pen.segment(left, pen.y(y), right, pen.y(y));
  });
  pen.context.globalAlpha = 1;
  for (const x of xs) pen.text(wordsOfX(x), pen.x(x), bottom + 5 * ratio, { colour: colour.dim, baseline: "top" });
  for (const y of ys) pen.text(short(y), left - 6 * ratio, pen.y(y), { colour: colour.dim, align: "right" });
}
