// Views that are saved on the service, under a name for all who see their project: of the table of jobs, and of the workspace.
import { $, element } from "./dom.js";
import { ask, field } from "./dialog.js";
import { request } from "./api.js";

const path = (project, name) => `/v1/views/${encodeURIComponent(project)}/${encodeURIComponent(name)}`;
export const keyOf = ({ project, name }) => `${project}/${name}`;
let views = [];

// By its key, PROJECT/NAME.
export const savedView = (key) => views.find((one) => keyOf(one) === key);

export async function loadViews() {
  views = (await request("/v1/views")).items;
}

// Fills the list of views with those that `isOffered`.
export function offerViews(current, isOffered = () => true) {
  const known = views.filter(isOffered);
  $("views").replaceChildren(
    new Option(known.length ? "none" : "none saved", ""),
    ...known.map((one) => new Option(`${one.project}: ${one.name}`, keyOf(one), false, keyOf(one) === current)),
  );
  $("drop-view").disabled = !$("views").value;
}

// The buttons that save and delete. document(before): what is to be saved over this view, or undefined; `usual()`: its project
// unless one is shown; shown(key): the view with this key is shown now, or none.
export function setUpSaving({ title, words, document, usual, shown }) {
  $("save-view").addEventListener("click", () => {
    const open = savedView($("views").value);
    const name = field("Name", { value: open?.name ?? "" }),
      project = field("Project", { id: "view-project", value: open?.project ?? (usual() || "default") });
    ask({
      title,
      confirm: "Save",
      input: [element("p", name), element("p", project)],
      words: async () => `${words} One with the same name is replaced.`,
      send: async () => {
        const one = { project: $("view-project").value.trim(), name: $("dialog-value").value.trim() };
        await request(path(one.project, one.name), { method: "PUT", body: document(savedView(keyOf(one))?.view) });
        await loadViews();
        shown(keyOf(one));
      },
    });
  });
  $("drop-view").addEventListener("click", () => {
    const { project, name } = savedView($("views").value);
    ask({
      title: `Delete the view ${name}`,
      confirm: "Delete",
      words: async () => `It is deleted for all who see the project ${project}. The jobs stay as they are.`,
      send: async () => {
        await request(path(project, name), { method: "DELETE" });
        await loadViews();
        shown("");
      },
    });
  });
}
