// What a panel draws over its curves: the band around the mean of a group, marks, and names at the ends of curves.
import { anomalies, lastValue } from "./columns.js";

// The band around the mean of a group. Where it goes below zero, a logarithmic axis shows it down to its end.
export function drawBand(context, inner, place, { xs, least, most, colour, from, to }, logY) {
  const fits = (at) => most[at] === most[at] && (!logY || most[at] > 0),
    low = (at) => (logY && !(least[at] > 0) ? inner.height : place.y(least[at]));
  context.globalAlpha = 0.18;
  context.fillStyle = colour;
  context.beginPath();
  for (let at = from; at < to; at += 1)
    if (fits(at)) context.lineTo(inner.left + place.x(xs[at]), inner.top + place.y(most[at]));
  for (let at = to - 1; at >= from; at -= 1)
    if (fits(at)) context.lineTo(inner.left + place.x(xs[at]), inner.top + low(at));
  context.fill();
  context.globalAlpha = 1;
}

// A triangle at a value far above those before it, and a cross at the last one before the rest is not finite.
export function drawMarks(context, inner, place, { xs, ys, from, to }, colour, ratio) {
  const { gaps, spikes } = anomalies(ys.subarray(0, to)),
    last = gaps.at(-1),
    isOver = last !== undefined && ys.subarray(last, to).every((value) => value !== value);
  const at = (index, value) => [inner.left + place.x(xs[index]), inner.top + place.y(value)],
    size = 4 * ratio;
  context.strokeStyle = colour;
  context.lineWidth = 1.5 * ratio;
  context.beginPath();
  for (const index of spikes.filter((one) => one >= from)) {
    const [x, y] = at(index, ys[index]);
    context.moveTo(x - size, y + size);
    context.lineTo(x, y - size);
    context.lineTo(x + size, y + size);
    context.closePath();
  }
  if (isOver) {
    const [x, y] = at(last - 1, lastValue(ys, last - 1));
    context.moveTo(x - size, y - size);
    context.lineTo(x + size, y + size);
    context.moveTo(x - size, y + size);
    context.lineTo(x + size, y - size);
  }
  context.stroke();
}

// Names where they do not cover each other, from the top; the others are read with the pointer.
export function drawNames(context, inner, place, lines, background, ratio) {
  const ends = lines.flatMap(({ name, colour, xs, ys, from, to }) => {
    let last = to - 1;
    while (last >= from && ys[last] !== ys[last]) last -= 1;
    return last < from ? [] : [{ name, colour, x: place.x(xs[last]), y: place.y(ys[last]) }];
  });
  let free = -Infinity;
  context.textBaseline = "middle";
  context.strokeStyle = background;
  context.lineWidth = 3 * ratio;
  for (const { name, colour, x, y } of ends.sort((a, b) => a.y - b.y)) {
    if (y < free || y < 0 || y > inner.height) continue;
    free = y + 12 * ratio;
    const text = name.length > 16 ? `${name.slice(0, 15)}…` : name,
      fits = x + context.measureText(text).width + 4 * ratio < inner.width,
      left = inner.left + Math.min(x, inner.width) + (fits ? 4 : -4) * ratio;
    context.textAlign = fits ? "left" : "right";
    context.strokeText(text, left, inner.top + y);
    context.fillStyle = colour;
    context.fillText(text, left, inner.top + y);
  }
}
