// The panels in their places: arranged with the pointer (drag a title, or an edge) or with the buttons of each, by keyboard too.
import { $, button, element } from "./dom.js";
import { describeKeys } from "./keys.js";
import { Panel } from "./panel.js";

describeKeys("+ - 0 ← →", "in a panel of curves: zoom in and out, the whole axis, move");

const COLUMN_PX = 400,
  MAX_WIDTH = 4,
  MAX_HEIGHT = 3,
  SLICE_MS = 8;

// The browser lays the page out anew after each write, even of the same value.
const set = ({ style, dataset }, name, value) => {
  if (dataset[name] !== value) {
    style[name] = value;
    dataset[name] = value;
  }
};

export class PanelGrid {
  // changed(): the arrangement is another one.
  constructor(workspace, changed) {
    this.workspace = workspace;
    this.changed = changed;
    this.panels = new Map();
    this.frame = 0;
    this.inView = new Set();
    this.waiting = new Set();
    this.isCoarse = false;
    this.seen = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        const panel = this.panelOf(target);
        if (panel) this.inView[isIntersecting ? "add" : "delete"](panel);
      }
      this.redraw();
    });
    new ResizeObserver(() => this.place()).observe($("panels"));
  }

  panelOf(section) {
    for (const [spec, one] of this.panels) if (one.section === section) return this.panels.get(spec).panel;
    return null;
  }

  show() {
    const { panels } = this.workspace.state;
    for (const [spec, { section, panel }] of this.panels)
      if (!panels.includes(spec)) {
        this.seen.unobserve(section);
        this.inView.delete(panel);
        this.panels.delete(spec);
        section.remove();
      }
    panels.forEach((spec) => {
      if (!this.panels.has(spec)) {
        const one = this.make(spec);
        this.panels.set(spec, one);
        this.seen.observe(one.section);
        this.inView.add(one.panel);
      }
    });
    panels.forEach((spec, index) => {
      const { section } = this.panels.get(spec);
      if ($("panels").children[index] !== section)
        $("panels").insertBefore(section, $("panels").children[index] ?? null);
    });
    $("no-panels").hidden = panels.length > 0;
    this.place();
  }

  place() {
    const columns = Math.max(1, Math.min(6, Math.floor($("panels").clientWidth / COLUMN_PX)));
    set($("panels"), "gridTemplateColumns", `repeat(${columns}, minmax(0, 1fr))`);
    for (const [spec, { section }] of this.panels) {
      set(section, "gridColumn", `span ${Math.min(columns, spec.width)}`);
      set(section, "gridRow", `span ${spec.height}`);
    }
    this.redraw();
  }

  // All panels that are in view. That of the user's hand comes first, with the next frame of the browser; others follow in
  // the frames after it, so that no frame takes long. Those that wait from before come before those that were drawn since.
  redraw() {
    const hand = [...this.inView].filter(
      (panel) => panel.body.contains(document.activeElement) || panel.body.matches(":hover"),
    );
    this.waiting = new Set([...hand, ...this.waiting, ...this.inView]);
    this.frame ||= requestAnimationFrame(() => this.slice());
  }

  slice() {
    const begun = performance.now();
    this.frame = 0;
    for (const panel of this.waiting) {
      this.waiting.delete(panel);
      if (this.inView.has(panel)) panel.draw();
      if (performance.now() - begun > SLICE_MS) break;
    }
    if (this.waiting.size) this.frame = requestAnimationFrame(() => this.slice());
    else {
      performance.mark(this.isCoarse ? "workspace-coarse" : "workspace-drawn", {
        detail: [...this.inView].reduce((sum, panel) => sum + panel.lines.length, 0),
      });
      this.isDrawn?.();
    }
  }

  // Fulfilled once what was shown last is on the screen. A page that nobody looks at has no frames.
  drawn() {
    return document.hidden
      ? Promise.resolve()
      : new Promise((fulfil) => {
          this.isDrawn = fulfil;
        });
  }

  // What follows the pointer, in all panels, once with the next frame.
  over() {
    this.overFrame ||= requestAnimationFrame(() => {
      this.overFrame = 0;
      for (const panel of this.inView) if (panel.raster) panel.drawOver();
    });
  }

  make(spec) {
    const panel = new Panel(spec, this.workspace),
      title = spec.kind === "scatter" ? `${spec.y} over ${spec.x}` : spec.y;
    const act = (label, text, change) =>
      button(
        text,
        () => {
          change();
          this.changed();
        },
        { "aria-label": `${label}: ${title}`, title: label },
      );
    const toggle = (label, text, field) => {
      const made = act(label, text, () => {
        spec[field] = !spec[field];
        made.setAttribute("aria-pressed", String(spec[field]));
      });
      made.setAttribute("aria-pressed", String(Boolean(spec[field])));
      return made;
    };
    const name = element("h3.grip", title, { title: "Drag to move" });
    const head = element("div.panel-head", [
      name,
      element("span.acts", [
        act("Move before", "‹", () => this.move(spec, -1)),
        act("Move after", "›", () => this.move(spec, 1)),
        act("Change width", "↔", () => {
          spec.width = (spec.width % MAX_WIDTH) + 1;
        }),
        act("Change height", "↕", () => {
          spec.height = (spec.height % MAX_HEIGHT) + 1;
        }),
        toggle("Log axis", "log", "log_y"),
        spec.kind === "lines" ? toggle("Hide outliers", "98%", "no_outliers") : null,
        act("Remove", "×", () => {
          const { panels } = this.workspace.state;
          panels.splice(panels.indexOf(spec), 1);
        }),
      ]),
    ]);
    const section = element("section.panel", [head, panel.body, this.corner(spec)], {
      "data-kind": spec.kind,
      "data-y": spec.y,
    });
    this.grip(name, spec, section);
    return { panel, section };
  }

  move(spec, by) {
    const { panels } = this.workspace.state,
      from = panels.indexOf(spec),
      to = Math.max(0, Math.min(panels.length - 1, from + by)),
      focused = document.activeElement;
    panels.splice(from, 1);
    panels.splice(to, 0, spec);
    this.show();
    focused?.focus();
  }

  grip(handle, spec, section) {
    const begin = () => section.classList.add("moving");
    const move = (event) => {
      const target = document
        .elementsFromPoint(event.clientX, event.clientY)
        .map((one) => one.closest(".panel"))
        .find((one) => one && one !== section);
      const other = target && [...this.panels].find(([, one]) => one.section === target)?.[0];
      const { panels } = this.workspace.state;
      if (other) this.move(spec, panels.indexOf(other) - panels.indexOf(spec));
    };
    drag(handle, begin, move, () => {
      section.classList.remove("moving");
      this.changed();
    });
  }

  corner(spec) {
    const made = element("span.corner", null, { "aria-hidden": "true", title: "Drag to change the size" });
    let from = null;
    const begin = (event) => {
      const box = made.parentElement.getBoundingClientRect(),
        { width, height } = spec;
      from = { x: event.clientX, y: event.clientY, wide: box.width / width, high: box.height / height, width, height };
    };
    const move = (event) => {
      spec.width = Math.max(1, Math.min(MAX_WIDTH, from.width + Math.round((event.clientX - from.x) / from.wide)));
      spec.height = Math.max(1, Math.min(MAX_HEIGHT, from.height + Math.round((event.clientY - from.y) / from.high)));
      this.place();
    };
    drag(made, begin, move, this.changed);
    return made;
  }
}

// Calls `move` while the pointer is held down on a handle.
function drag(handle, begin, move, end) {
  let isHeld = false;
  handle.addEventListener("pointerdown", (event) => {
    event.preventDefault();
    handle.setPointerCapture(event.pointerId);
    isHeld = true;
    begin(event);
  });
  handle.addEventListener("pointermove", (event) => {
    if (isHeld) move(event);
  });
  for (const name of ["pointerup", "pointercancel"])
    handle.addEventListener(name, () => {
      if (isHeld) end();
      isHeld = false;
    });
}
