// Workspaces that are saved on the service, under a name for all who see the project; and what of a view is the workspace's.
import { $, element } from "./dom.js";
import { ask } from "./dialog.js";
import { request } from "./api.js";

const path = (project, name) => `/v1/views/${encodeURIComponent(project)}/${encodeURIComponent(name)}`;
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
let views = [];

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

export function toView(state, before) {
  const {
    where,
    search,
    archived,
    panels,
    axis,
    smoothing,
    log_x,
    group,
    band,
    project,
    limit,
    hidden,
    colours,
    zoom,
  } = state;
  return {
    ...(before ?? {}),
    where,
    search,
    archived,
    workspace: { panels, axis, smoothing, log_x, group, band, project, limit, hidden: [...hidden], colours, zoom },
  };
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

export const find = (project, name) => views.find((one) => one.project === project && one.name === name);

// Views of the project that is chosen, or of all; the one that is shown is always among them.
export async function loadViews(current, project) {
  views = (await request("/v1/views")).items;
  showViews(current, project);
}

export function showViews(current, project) {
  const known = views.filter(
    (one) => one.view.workspace && (!project || one.project === project || `${one.project}/${one.name}` === current),
  );
  $("views").replaceChildren(
    new Option(known.length ? "none" : "none saved", ""),
    ...known.map(
      ({ project, name }) =>
        new Option(`${project}: ${name}`, `${project}/${name}`, false, `${project}/${name}` === current),
    ),
  );
  $("drop-view").disabled = !$("views").value;
}

// opened(key): the view PROJECT/NAME is to be shown, or none; saved(key): it is the one that is shown.
export function setUpViews(state, opened, saved) {
  $("views").addEventListener("change", () => opened($("views").value));
  $("save-view").addEventListener("click", () => {
    const [ofProject, ...rest] = $("views").value.split("/");
    const name = element("input", null, { id: "dialog-value", value: rest.join("/") }),
      project = element("input", null, { id: "view-project", value: ofProject || state.project || "default" });
    ask({
      title: "Save this workspace",
      confirm: "Save",
      input: [element("p", element("label", ["Name ", name])), element("p", element("label", ["Project ", project]))],
      words: async () =>
        "Project, condition, panels, axis, groups, colours, hidden jobs and zoom are kept under this name, for all who see the project. One with the same name is replaced. The address of the page is then a link to it.",
      send: async () => {
        const key = `${project.value.trim()}/${name.value.trim()}`;
        await request(path(project.value.trim(), name.value.trim()), {
          method: "PUT",
          body: toView(state, find(project.value.trim(), name.value.trim())?.view),
        });
        await loadViews(key, state.project);
        saved(key);
      },
    });
  });
  $("drop-view").addEventListener("click", () => {
    const [project, ...rest] = $("views").value.split("/"),
      name = rest.join("/");
    ask({
      title: `Delete the view ${name}`,
      confirm: "Delete",
      words: async () => `It is deleted for all who see the project ${project}. The jobs stay as they are.`,
      send: async () => {
        await request(path(project, name), { method: "DELETE" });
        await loadViews("", state.project);
        saved("");
      },
    });
  });
}

export async function offerProjects() {
  const { items } = await request("/v1/projects");
  $("project").replaceChildren(new Option("all", ""), ...items.map(({ name }) => new Option(name, name)));
}
