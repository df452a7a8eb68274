// Lines as pixels of an image: 1,600 curves in a few hundredths of a second, without a GPU (decision 0031). Few curves are drawn
// as smooth strokes of the canvas instead, where they are seen one by one. Coordinates are those of the image.
import { DASHES } from "./looks.js";
import { placing } from "./canvas.js";

const SMOOTH = 6000; // points that are drawn as strokes, at most
const DOT = 4; // pixels of a curve that has one point

export class Raster {
  constructor(pen) {
    this.pen = pen;
    this.width = Math.max(1, pen.width | 0);
    this.height = Math.max(1, pen.height | 0);
    this.pixels = new Uint32Array(this.width * this.height);
    this.image = new ImageData(new Uint8ClampedArray(this.pixels.buffer), this.width, this.height);
  }

  // lines: [{ xs, ys, colour: "#rrggbb", dash, wide, from, to }], in the view of the pen.
  draw(lines, background) {
    const points = lines.reduce((sum, line) => sum + line.to - line.from, 0),
      { pen } = this;
    if (points <= SMOOTH) {
      pen.within(() => this.strokes(lines));
      return;
    }
    this.pixels.fill(packed(background));
    const place = placing(pen.view, this.width, this.height);
    for (const line of lines) this.polyline(line, place, packed(line.colour), line.wide);
    pen.context.putImageData(this.image, pen.left, pen.top);
  }

  strokes(lines) {
    const { pen } = this,
      { context, ratio } = pen;
    context.lineJoin = "round";
    for (const line of lines) {
      const { xs, ys, from, to, colour, dash, wide } = line;
      context.setLineDash(DASHES[dash].map((length) => length * ratio));
      pen.stroke(colour, (wide ? 2.2 : 1.3) * ratio, () => pen.path(line));
      const only = onlyPoint(ys, from, to);
      context.fillStyle = colour;
      if (only >= 0) context.fillRect(pen.x(xs[only]) - DOT / 2, pen.y(ys[only]) - DOT / 2, DOT, DOT);
    }
  }

  polyline({ xs, ys, from, to }, { logX, logY, x0, y1, kx, ky }, ink, wide) {
    const only = onlyPoint(ys, from, to);
    let lastX = NaN,
      lastY = NaN;
    for (let at = from; at < to; at += 1) {
      const value = ys[at];
      if (value !== value) continue;
      const x = ((logX ? Math.log10(xs[at]) : xs[at]) - x0) * kx,
        y = (y1 - (logY ? Math.log10(value) : value)) * ky;
      if (lastX === lastX) this.segment(lastX, lastY, x, y, ink, wide);
      else if (at === only)
        for (let row = -DOT / 2; row < DOT / 2; row += 1)
          this.segment(x - DOT / 2, y + row, x + DOT / 2, y + row, ink, false);
      lastX = x;
      lastY = y;
    }
  }

  // Pixel by pixel along the longer side.
  segment(ax, ay, bx, by, ink, wide) {
    const { width, height, pixels } = this,
      right = width - 1,
      bottom = height - 1;
    if (ax < 0 || ay < 0 || bx < 0 || by < 0 || ax > right || bx > right || ay > bottom || by > bottom) {
      const inside = clipped(ax, ay, bx, by, right, bottom);
      if (!inside) return;
      [ax, ay, bx, by] = inside;
    }
    const spanX = bx - ax,
      spanY = by - ay,
      longX = Math.abs(spanX),
      longY = Math.abs(spanY),
      num = (longX > longY ? longX : longY) | 0;
    const stepX = num ? spanX / num : 0,
      stepY = num ? spanY / num : 0,
      beside = longX >= longY ? width : 1;
    let x = ax + 0.5,
      y = ay + 0.5;
    for (let at = 0; at <= num; at += 1) {
      const pixel = (y | 0) * width + (x | 0);
      pixels[pixel] = ink;
      if (wide) pixels[pixel + beside] = ink;
      x += stepX;
      y += stepY;
    }
  }
}

// The index of the only value of a line; -1 if it has none or several.
export function onlyPoint(ys, from, to) {
  let only = -1;
  for (let at = from; at < to; at += 1) {
    if (ys[at] !== ys[at]) continue;
    if (only >= 0) return -1;
    only = at;
  }
  return only;
}

// The part of a segment that lies in the image (Liang and Barsky, 1984); null: none.
function clipped(ax, ay, bx, by, right, bottom) {
  const dx = bx - ax,
    dy = by - ay;
  let begin = 0,
    end = 1;
  for (const [p, q] of [
    [-dx, ax],
    [dx, right - ax],
    [-dy, ay],
    [dy, bottom - ay],
  ]) {
    if (p === 0) {
      if (q < 0) return null;
      continue;
    }
    const share = q / p;
    if (p < 0) {
      if (share > begin) begin = share;
    } else if (share < end) end = share;
  }
  return begin <= end ? [ax + begin * dx, ay + begin * dy, ax + end * dx, ay + end * dy] : null;
}

// Pixels are little-endian RGBA on every machine that a browser runs on.
export const packed = (colour) => {
  const rgb = parseInt(colour.slice(1, 7), 16);
  return ((255 << 24) | ((rgb & 255) << 16) | (rgb & 0xff00) | (rgb >> 16)) >>> 0;
};
