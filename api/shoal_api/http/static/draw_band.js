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
