// The jobs at the left of a workspace: which are drawn, in which colour, and in which group.
import { $, button, element, fillEach, link, small } from "./dom.js";
import { jobPage } from "./api.js";
import { badge } from "./states.js";
import { compare, numeric, plural } from "./format.js";
import { looksOf } from "./looks.js";
import { bare } from "./job_query.js";

// Groups if the state has a group, else each job alone: [{ key, name, colour, dash, isShown, members }].
export function groupsOf(jobs, state) {
  const found = new Map(),
    name = state.group;
  for (const job of jobs) {
    const key = name ? String(job.values[name] ?? job.values[bare(name)] ?? "none") : job.id;
    if (!found.has(key)) found.set(key, { key, name: name ? `${name}: ${key}` : job.name, members: [] });
    found.get(key).members.push(job);
  }
  const groups = [...found.values()];
  if (name) groups.sort((a, b) => compare(numeric(a.key), numeric(b.key)));
  const looks = looksOf(
    groups.map(({ key }) => key),
    state.colours,
  );
  groups.forEach((one) => {
    Object.assign(one, looks.get(one.key));
    one.isShown = !state.hidden.has(one.key);
  });
  return groups;
}

export class RunList {
  // changed(): another choice or colour; mark(key): this one is pointed at, or none.
  constructor(state, changed, mark) {
    this.state = state;
    this.changed = changed;
    this.mark = mark;
    this.shape = "";
    $("show-all").addEventListener("click", () => {
      state.hidden.clear();
      changed();
    });
    $("show-none").addEventListener("click", () => {
      for (const { key } of this.groups) state.hidden.add(key);
      changed();
    });
  }

  show(groups, total) {
    this.groups = groups;
    const shape = groups.map(({ key, members }) => `${key} ${members.map((job) => job.id)}`).join();
    if (shape !== this.shape) {
      this.shape = shape;
      this.rows = groups.map((group) => this.row(group));
      fillEach("runs", this.rows, ({ item }) => item);
    }
    groups.forEach((group, index) => this.refresh(this.rows[index], group));
    const num = groups.reduce((sum, { members }) => sum + members.length, 0);
    $("num-runs").textContent =
      `${groups.filter((one) => one.isShown).length} of ${groups.length} ${this.state.group ? "groups" : "jobs"} shown${total > num ? `, the first ${num} of ${total} that match` : ""}`;
    $("no-runs").hidden = num > 0;
  }

  row(group) {
    const { key, name, members } = group,
      { state } = this,
      made = {};
    const box = element("input", null, {
      type: "checkbox",
      "aria-label": `Show ${name}`,
      change: () => {
        state.hidden[box.checked ? "delete" : "add"](key);
        made.isShown = box.checked;
        this.changed();
      },
    });
    const dot = element("input", null, {
      type: "color",
      "aria-label": `Colour of ${name}`,
      input: () => {
        state.colours[key] = made.colour = dot.value;
        this.changed();
      },
    });
    const showOnly = () => {
      for (const one of this.groups) state.hidden[one.key === key ? "delete" : "add"](one.key);
      this.changed();
    };
    const only = button("only", showOnly, { "aria-label": `Show only ${name}` });
    const facts = small(null);
    const title = state.group
      ? element("b", `${name} (${members.length})`)
      : link(name, jobPage(members[0].id), { title: members[0].id });
    const mark = () => this.mark(key),
      unmark = () => this.mark(null);
    const item = element("li", [element("label.hit", box), dot, element("span.run-name", [title, " ", facts]), only], {
      "data-key": key,
      pointerenter: mark,
      pointerleave: unmark,
      focusin: mark,
      focusout: unmark,
    });
    Object.assign(made, { item, box, dot, facts });
    return made;
  }

  // Touches only what differs: with 200 rows, reading what the elements show takes longer than drawing the panels.
  refresh(row, { colour, dash, isShown, members }) {
    if (row.dash !== dash) row.dot.dataset.dash = row.dash = dash;
    if (row.isShown !== isShown) row.box.checked = row.isShown = isShown;
    if (row.colour !== colour) row.dot.value = row.colour = colour;
    if (this.state.group) return;
    const [{ state, step, incidents }] = members,
      text = ` ${step}${incidents ? `, ${plural(incidents, "incident")}` : ""}`;
    if (row.text !== state + text) {
      row.text = state + text;
      row.facts.replaceChildren(badge(state), text);
    }
  }
}
