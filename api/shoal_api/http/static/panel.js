// One panel: a canvas with axes, and over it a second one with what follows the pointer. It draws when the grid says so.
import { element } from "./dom.js";
import { duration, short } from "./axes.js";
import { colours } from "./looks.js";
import { drawBand, drawGrid, drawMarks, drawNames } from "./draw_over.js";
import { whole } from "./format.js";
import { extentOf, linesOf, viewOf } from "./panel_lines.js";
import { Raster } from "./raster.js";
import { isMetricAxis, nearestPoint, valueAt } from "./curve_data.js";
import { drawBars, drawScatter } from "./panel_values.js";
import { Pen } from "./canvas.js";

const LEFT = 60,
  RIGHT = 10,
  TOP = 8,
  BOTTOM = 22;
const NAMED = 10; // jobs that the words under the pointer name; with more curves their names stand at their ends
const MARKED = new Set(["loss", "grad_norm"]); // metrics whose spikes and ends that are not finite are marked

export class Panel {
  // workspace: { state, version, shown(), curveOf, zoomTo(range), point(x) }; another version: other lines.
  constructor(spec, workspace) {
    this.spec = spec;
    this.workspace = workspace;
    this.lines = [];
    this.view = null;
    this.raster = null;
    this.version = null;
    this.canvas = element("canvas", null, {
      tabindex: "0",
      role: "img",
      "aria-label": spec.y,
      pointermove: (event) => this.hover(event),
      pointerleave: () => {
        if (this.drag === undefined) workspace.point(null);
        this.words.hidden = true;
      },
      pointerdown: (event) => {
        if (!this.isLines || event.button !== 0) return;
        this.drag = event.offsetX;
        this.canvas.setPointerCapture(event.pointerId);
      },
      pointerup: (event) => this.dragged(event),
      dblclick: () => this.isLines && workspace.zoomTo(null),
      keydown: (event) => this.key(event),
    });
    this.over = element("canvas.over", null, { "aria-hidden": "true" });
    this.words = element("div.words", null, { hidden: true });
    this.body = element("div.plot", [this.canvas, this.over, this.words]);
    this.canvas.addEventListener(
      "wheel",
      (event) => {
        if (!event.ctrlKey || !this.isLines || !this.view) return;
        event.preventDefault();
        this.zoomBy(event.deltaY > 0 ? 1.25 : 0.8, this.xAt(event.offsetX));
      },
      { passive: false },
    );
  }

  get isLines() {
    return this.spec.kind === "lines";
  }

  draw() {
    const ratio = devicePixelRatio || 1,
      { clientWidth, clientHeight } = this.body;
    if (!clientWidth || !clientHeight) return;
    const width = Math.round(clientWidth * ratio),
      height = Math.round(clientHeight * ratio);
    if (this.canvas.width !== width || this.canvas.height !== height || !this.raster) {
      for (const one of [this.canvas, this.over]) {
        one.width = width;
        one.height = height;
      }
      const box = {
        left: Math.round(LEFT * ratio),
        top: Math.round(TOP * ratio),
        width: Math.round(width - (LEFT + RIGHT) * ratio),
        height: Math.round(height - (TOP + BOTTOM) * ratio),
      };
      this.pen = new Pen(this.canvas.getContext("2d", { alpha: false }), box, ratio);
      this.penOver = new Pen(this.over.getContext("2d"), box, ratio);
      this.raster = new Raster(this.pen);
    }
    const { context } = this.pen,
      colour = colours();
    context.fillStyle = colour.card;
    context.fillRect(0, 0, width, height);
    context.font = `${11 * ratio}px system-ui, sans-serif`;
    const { state } = this.workspace,
      shown = this.workspace.shown();
    if (this.isLines) this.drawLines(shown, state, colour);
    else {
      this.view = null;
      this.marks = (this.spec.kind === "scatter" ? drawScatter : drawBars)(this.pen, this.spec, shown, colour);
      if (!this.marks.length) this.empty(colour);
    }
    this.canvas.setAttribute(
      "aria-label",
      this.isLines
        ? `${this.spec.y} over ${state.axis}: ${this.lines.length} curves${extentOf(this.view, state.axis === "time" ? duration : short)}`
        : `${this.spec.kind} of ${this.spec.y}${this.spec.x ? ` over ${this.spec.x}` : ""}: ${this.marks.length} values`,
    );
    this.canvas.dataset.num = this.isLines ? this.lines.length : this.marks.length;
    this.drawOver();
  }

  drawLines(shown, state, colour) {
    if (this.version !== this.workspace.version) {
      this.lines = linesOf(shown, this.workspace.curveOf, this.spec.y, state, Boolean(state.group));
      this.version = this.workspace.version;
    }
    const view = (this.view = viewOf(this.lines, {
      zoom: state.zoom,
      logX: state.log_x,
      logY: this.spec.log_y,
      isTrimmed: this.spec.no_outliers,
    }));
    if (!view) {
      this.empty(colour);
      return;
    }
    const { pen } = this,
      drawn = this.lines.map((line) => ({ ...line, wide: Boolean(line.least) }));
    pen.setView(view);
    this.penOver.setView(view);
    this.raster.draw(drawn, colour.card);
    pen.within(() => {
      for (const line of this.lines) if (line.least) drawBand(pen, line);
      if (MARKED.has(this.spec.y) && this.lines.length <= NAMED)
        for (const line of this.lines) drawMarks(pen, line, colour.bad);
      if (this.lines.length > NAMED) drawNames(pen, this.lines, colour.card);
    });
    drawGrid(pen, colour, state.axis === "time" ? duration : short);
  }

  empty(colour) {
    const { pen } = this,
      words = `No job that is shown has ${this.spec.x ? `${this.spec.x} and ` : ""}${this.spec.y}.`;
    pen.text(words, pen.left + pen.width / 2, pen.top + pen.height / 2, { colour: colour.dim });
  }

  // The line at the pointer's position in every panel, a job that is pointed at, and the part that is being chosen.
  drawOver() {
    const pen = this.penOver,
      { top, bottom, height, ratio } = pen,
      colour = colours(),
      { pointed, marked } = this.workspace;
    pen.context.clearRect(0, 0, this.over.width, this.over.height);
    if (!this.isLines || !this.view) return;
    const line = marked && this.lines.find((one) => one.key === marked);
    pen.within(() => {
      if (line) pen.stroke(line.colour, 3 * ratio, () => pen.path(line));
      if (pointed !== null) pen.stroke(colour.dim, 1, () => pen.segment(pen.x(pointed), top, pen.x(pointed), bottom));
      if (this.drag !== undefined && this.dragTo !== undefined)
        pen.shade(colour.accent, () =>
          pen.context.rect(this.drag * ratio, top, (this.dragTo - this.drag) * ratio, height),
        );
    });
  }

  xAt(offset) {
    return this.pen.place.atX(offset * this.pen.ratio - this.pen.left);
  }

  hover(event) {
    if (!this.isLines) {
      this.say(this.marks ? this.nearestMark(event) : []);
      return;
    }
    if (!this.view) return;
    if (this.drag !== undefined) this.dragTo = event.offsetX;
    const { ratio } = this.pen,
      y = event.offsetY * ratio;
    const valuesAt = (x) =>
      this.lines
        .map((line) => ({ line, value: valueAt(line.xs, line.ys, x) }))
        .filter(({ value }) => value === value)
        .map((one) => ({ ...one, away: Math.abs(this.pen.y(one.value) - y) }))
        .sort((a, b) => a.away - b.away);
    const free = this.xAt(event.offsetX),
      nearest = valuesAt(free)[0]?.line;
    // a step that exists: between two points of a curve there is no value to be read
    const x = nearest ? nearestPoint(nearest, free) : free,
      found = valuesAt(x);
    this.workspace.mark(found[0]?.away < 24 * ratio ? found[0].line.key : null);
    this.workspace.point(x);
    const shown = found.slice(0, NAMED);
    this.say([
      [
        this.workspace.state.axis === "time"
          ? duration(x)
          : `${this.workspace.state.axis} ${isMetricAxis(this.workspace.state.axis) ? short(x) : whole(x)}`,
        "",
      ],
      ...shown
        .sort((a, b) => b.value - a.value)
        .map(({ line, value }) => [`${short(value)}  ${line.name}`, line.colour]),
      ...(found.length > NAMED ? [[`and ${found.length - NAMED} more`, ""]] : []),
    ]);
  }

  nearestMark({ offsetX, offsetY }) {
    const { ratio } = this.pen,
      x = offsetX * ratio,
      y = offsetY * ratio;
    const mark = this.marks.find((one) => x >= one.x0 && x <= one.x1 && y >= one.y0 && y <= one.y1);
    this.workspace.mark(mark?.key ?? null);
    return mark ? [[mark.words, mark.colour]] : [];
  }

  say(rows) {
    this.words.hidden = !rows.length;
    this.words.replaceChildren(
      ...rows.map(([text, colour]) => {
        const made = element("div", text);
        if (colour) made.style.color = colour;
        return made;
      }),
    );
  }

  dragged(event) {
    const from = this.drag,
      to = event.offsetX;
    this.drag = this.dragTo = undefined;
    if (from === undefined || !this.view) return;
    if (Math.abs(to - from) > 4) this.workspace.zoomTo([this.xAt(Math.min(from, to)), this.xAt(Math.max(from, to))]);
  }

  key(event) {
    if (!this.isLines || !this.view || event.ctrlKey || event.metaKey || event.altKey) return;
    const move = {
      "+": () => this.zoomBy(0.5),
      "=": () => this.zoomBy(0.5),
      "-": () => this.zoomBy(2),
      ArrowLeft: () => this.pan(-0.2),
      ArrowRight: () => this.pan(0.2),
      0: () => this.workspace.zoomTo(null),
    }[event.key];
    if (move) {
      event.preventDefault();
      move();
    }
  }

  zoomBy(factor, around) {
    const { x0, x1, logX } = this.view,
      middle = around === undefined ? (x0 + x1) / 2 : logX ? Math.log10(around) : around;
    this.range(middle - (middle - x0) * factor, middle + (x1 - middle) * factor);
  }

  pan(share) {
    const { x0, x1 } = this.view,
      by = (x1 - x0) * share;
    this.range(x0 + by, x1 + by);
  }
  range(x0, x1) {
    this.workspace.zoomTo(this.view.logX ? [10 ** x0, 10 ** x1] : [x0, x1]);
  }
}
