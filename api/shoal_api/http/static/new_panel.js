// The form that adds a panel: of which kind, and of what.
import { $, element, fillEach, onSubmit } from "./dom.js";
import { offer } from "./address.js";
import { request } from "./api.js";
import { newPanel } from "./workspace_views.js";

export const PLAIN = ["loss", "val_loss", "grad_norm", "lr", "tokens_per_s", "step_s", "world_size"];
export const isMetric = (name) => PLAIN.includes(name) || /^(metric|val)\../.test(name);

// changed(): the state has a panel more; problem(text): why it has not.
export function setUpNewPanel(state, changed, problem) {
  $("kind").addEventListener("change", () => {
    $("of-x").hidden = $("kind").value !== "scatter";
  });
  onSubmit("add", () => {
    const kind = $("kind").value,
      y = $("y").value.trim(),
      x = kind === "scatter" ? $("x").value.trim() : "";
    if (kind === "lines" && !isMetric(y)) {
      problem(`${y || "nothing"} is no metric of a curve: write one of ${PLAIN.join(", ")}, metric.NAME or val.NAME.`);
      return;
    }
    if (!y || (kind === "scatter" && !x)) {
      problem("A panel needs a name for each of its axes.");
      return;
    }
    state.panels.push(newPanel(y, { kind, x }));
    $("y").value = $("x").value = "";
    changed();
  });
}

// The names that its fields, and that of the groups, suggest.
export async function offerNames() {
  const { items } = await request("/v1/job-fields");
  const names = [...PLAIN, ...items.map(({ name }) => name)];
  fillEach("names", names, (name) => element("option", null, { value: name }));
  offer($("axis"), names.filter(isMetric));
}
