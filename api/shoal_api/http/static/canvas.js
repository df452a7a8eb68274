// Draws into the box of a panel: lines, areas and words; by values, once it has a view. Pixels are those of the canvas.
export class Pen {
  // box: { left, top, width, height }; ratio: pixels of the canvas for each one of the page.
  constructor(context, box, ratio) {
    Object.assign(this, { context, ...box, right: box.left + box.width, bottom: box.top + box.height, ratio });
  }

  // view: { x0, x1, y0, y1, logX, logY }; the ends of a logarithmic axis are logarithms.
  setView(view) {
    this.view = view;
    this.place = placing(view, this.width, this.height);
  }

  x(value) {
    return this.left + this.place.x(value);
  }

  y(value) {
    return this.top + this.place.y(value);
  }

  within(draw) {
    const { context } = this;
    context.save();
    context.beginPath();
    context.rect(this.left, this.top, this.width, this.height);
    context.clip();
    draw();
    context.restore();
  }

  // What trace() lays out as a path.
  stroke(colour, width, trace) {
    const { context } = this;
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.beginPath();
    trace();
    context.stroke();
  }

  // The same, as an area through which the curves are seen.
  shade(colour, trace) {
    const { context } = this;
    context.globalAlpha = 0.18;
    context.fillStyle = colour;
    context.beginPath();
    trace();
    context.fill();
    context.globalAlpha = 1;
  }

  segment(x0, y0, x1, y1) {
    this.context.moveTo(x0, y0);
    this.context.lineTo(x1, y1);
  }

  // The shown part of a line, over its gaps.
  path({ xs, ys, from, to }) {
    for (let at = from; at < to; at += 1) if (ys[at] === ys[at]) this.context.lineTo(this.x(xs[at]), this.y(ys[at]));
  }

  // halo: words over curves are outlined in the colour of strokes.
  text(words, x, y, { colour, align = "center", baseline = "middle", most, halo = false }) {
    const { context } = this;
    context.fillStyle = colour;
    context.textAlign = align;
    context.textBaseline = baseline;
    if (halo) context.strokeText(words, x, y);
    context.fillText(words, x, y, most);
  }
}

export function placing({ x0, x1, y0, y1, logX, logY }, width, height) {
  const kx = (width - 1) / (x1 - x0 || 1),
    ky = (height - 1) / (y1 - y0 || 1);
  return {
    logX,
    logY,
    x0,
    y1,
    kx,
    ky,
    x: (x) => ((logX ? Math.log10(x) : x) - x0) * kx,
    y: (y) => (y1 - (logY ? Math.log10(y) : y)) * ky,
    atX: (pixel) => {
      const at = pixel / kx + x0;
      return logX ? 10 ** at : at;
    },
  };
}
