// Views of the table that are saved on the service, for all who see their project.
import { $, element } from "./dom.js";
import { ask } from "./dialog.js";
import { request } from "./api.js";
import { NOTHING } from "./job_query.js";

const KEPT = ["where", "sort", "columns", "search", "state", "label", "cluster"];
const path = (project, name) => `/v1/views/${encodeURIComponent(project)}/${encodeURIComponent(name)}`;
let views = [];

export function setUpViews(view, change) {
  $("views").addEventListener("change", () => {
    const saved = views[$("views").value];
    $("drop-view").disabled = !saved;
    change({ ...NOTHING, ...(saved ? { ...saved.view, archived: saved.view.archived ? "true" : "" } : {}) });
  });
  $("save-view").addEventListener("click", () => {
    const open = views[$("views").value];
    const name = element("input", null, { id: "dialog-value", value: open?.name ?? "" });
    const project = element("input", null, { value: open?.project ?? (view.project || "default") });
    const document = { ...Object.fromEntries(KEPT.map((key) => [key, view[key]])), archived: view.archived === "true" };
    ask({
      title: "Save this view",
      confirm: "Save",
      input: [element("p", element("label", ["Name ", name])), element("p", element("label", ["Project ", project]))],
      words: async () =>
        "Condition, order, columns and filters are kept under this name, for all who see the project. One with the same name is replaced.",
      send: async () => {
        const replaced = views.find((one) => one.project === project.value.trim() && one.name === name.value.trim()); // its panels stay
        await request(path(project.value.trim(), name.value.trim()), {
          method: "PUT",
          body: { ...document, workspace: replaced?.view.workspace ?? null },
        });
        await load(`${project.value.trim()}/${name.value.trim()}`);
      },
    });
  });
  $("drop-view").addEventListener("click", () => {
    const { project, name } = views[$("views").value];
    ask({
      title: `Delete the view ${name}`,
      confirm: "Delete",
      words: async () => `It is deleted for all who see the project ${project}. The jobs stay as they are.`,
      send: async () => {
        await request(path(project, name), { method: "DELETE" });
        await load("");
      },
    });
  });
  load("");
}

async function load(current) {
  views = (await request("/v1/views")).items;
  const options = views.map(
    ({ project, name }, index) =>
      new Option(`${project}: ${name}`, String(index), false, `${project}/${name}` === current),
  );
  $("views").replaceChildren(new Option(views.length ? "none" : "none saved", ""), ...options);
  $("drop-view").disabled = !$("views").value;
}
