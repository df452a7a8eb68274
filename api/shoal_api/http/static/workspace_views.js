// Workspaces that are saved on the service, under a name for all who see the project; and what of a view is the workspace's.
import { $, fill } from "./dom.js";
import { keyOf, request } from "./api.js";
import { offerViews, setUpSaving } from "./views.js";

const PANELS = ["loss", "val_loss", "tokens_per_s", "grad_norm", "lr", "world_size"];
export const newPanel = (y, more = {}) => ({
  kind: "lines",
  y,
  x: "",
  log_y: false,
  no_outliers: false,
  width: 1,
  height: 1,
  ...more,
});

export function initial() {
  return {
    where: "",
    project: "",
    search: "",
    archived: false,
    panels: PANELS.map((name) => newPanel(name)),
    axis: "step",
    smoothing: 0,
    log_x: false,
    group: "",
    band: "min_max",
    limit: 200,
    hidden: new Set(),
    colours: {},
    zoom: null,
  };
}

// Takes over what a saved view has.
export function apply(state, view) {
  const { where, search, archived, workspace } = view; // a view of the table of jobs may have no workspace
  Object.assign(state, initial(), { where, search, archived }, workspace ?? {});
  state.hidden = new Set(workspace?.hidden ?? []);
  state.panels = (workspace?.panels ?? initial().panels).map((one) => ({ ...one }));
  state.colours = { ...(workspace?.colours ?? {}) };
}

const SELECTION = ["where", "search", "archived"];
export function toView(state, before) {
  const workspace = { ...state, hidden: [...state.hidden] };
  for (const name of SELECTION) delete workspace[name];
  return { ...before, ...Object.fromEntries(SELECTION.map((name) => [name, state[name]])), workspace };
}

// What differs from a new workspace, as the last part of an address.
export function toText(state) {
  const now = toView(state).workspace,
    usual = toView(initial()).workspace;
  const changed = Object.entries(now).filter(
    ([name, value]) => name !== "project" && JSON.stringify(value) !== JSON.stringify(usual[name]),
  );
  return changed.length ? `#${encodeURIComponent(JSON.stringify(Object.fromEntries(changed)))}` : "";
}

// Takes over what the address holds; returns the view that it names. An address that was cut off has no last part.
export function applyAddress(state, { search, hash }) {
  const address = new URLSearchParams(search),
    given = Object.fromEntries(["where", "project", "search"].map((name) => [name, address.get(name) ?? ""]));
  let workspace = {};
  try {
    workspace = JSON.parse(decodeURIComponent(hash.slice(1)) || "{}");
  } catch {
    /* as without it */
  }
  apply(state, { ...given, archived: false, workspace: { ...workspace, project: given.project } });
  return address.get("view");
}

// Views of the project that is chosen, or of all; the one that is shown is always among them.
export function showViews(current, project) {
  offerViews(current, (one) => one.view.workspace && (!project || one.project === project || keyOf(one) === current));
}

// opened(key): the view PROJECT/NAME is to be shown, or none; saved(key): it is the one that is shown.
export function setUpViews(state, opened, saved) {
  $("views").addEventListener("change", () => opened($("views").value));
  setUpSaving({
    title: "Save this workspace",
    words:
      "Project, condition, panels, axis, groups, colours, hidden jobs and zoom are kept under this name, for all who see the project. The address of the page is then a link to it.",
    usual: () => state.project,
    document: (before) => toView(state, before),
    shown: (key) => {
      showViews(key, state.project);
      saved(key);
    },
  });
}

export async function offerProjects() {
  const { items } = await request("/v1/projects");
  fill("project", [new Option("all", ""), ...items.map(({ name }) => new Option(name, name))]);
}
