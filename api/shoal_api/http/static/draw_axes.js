// Grid lines and numbers of a panel.
import { short, ticks } from "./axes.js";
import { placing } from "./raster.js";

export function drawAxes(context, inner, view, colour, ratio, wordsOfX = short) {
  const place = placing({ ...view, logX: false, logY: false }, inner.width, inner.height),
    { left, top, width, height } = inner;
  context.fillStyle = colour.dim;
  context.strokeStyle = colour.line;
  context.lineWidth = 1;
  context.globalAlpha = 0.7;
  context.beginPath();
  const xs = ticks(view.x0, view.x1, Math.max(2, width / (90 * ratio)), view.logX),
    ys = ticks(view.y0, view.y1, Math.max(2, height / (36 * ratio)), view.logY);
  for (const x of xs) {
    context.moveTo(left + place.x(x), top);
    context.lineTo(left + place.x(x), top + height);
  }
  for (const y of ys) {
    context.moveTo(left, top + place.y(y));
    context.lineTo(left + width, top + place.y(y));
  }
  context.stroke();
  context.globalAlpha = 1;
  context.textAlign = "center";
  context.textBaseline = "top";
  for (const x of xs) context.fillText(wordsOfX(view.logX ? 10 ** x : x), left + place.x(x), top + height + 5 * ratio);
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const y of ys) context.fillText(short(view.logY ? 10 ** y : y), left - 6 * ratio, top + place.y(y));
}
