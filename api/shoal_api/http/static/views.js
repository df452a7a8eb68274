// Views that are saved on the service, under a name for all who see their project: of the table of jobs, and of the workspace.
import { $, element, fill, showText } from "./dom.js";
import { ask, field } from "./dialog.js";
import { keyOf, put, remove, request } from "./api.js";

const path = ({ project, name }) => `/v1/views/${encodeURIComponent(project)}/${encodeURIComponent(name)}`;
let views = [];

// By its key, PROJECT/NAME.
export const savedView = (key) => views.find((one) => keyOf(one) === key);

export async function loadViews() {
  views = (await request("/v1/views")).items;
}

// Fills the list of views with those that `isOffered`.
export function offerViews(current, isOffered = () => true) {
  const known = views.filter(isOffered);
  fill("views", [
    new Option(known.length ? "none" : "none saved", ""),
    ...known.map((one) => new Option(`${one.project}: ${one.name}`, keyOf(one), false, keyOf(one) === current)),
  ]);
  $("drop-view").disabled = !$("views").value;
}

// The buttons that save and delete. document(before): what is to be saved over this view, or undefined; `usual()`: its project
// unless one is shown; shown(key): the view with this key is shown now, or none.
export function setUpSaving({ title, words, document, usual, shown }) {
  const show = (key) => loadViews().then(() => shown(key));
  $("save-view").addEventListener("click", () => {
    const open = savedView($("views").value);
    const name = field("Name", { value: open?.name ?? "" }),
      project = field("Project", { id: "view-project", value: open?.project ?? (usual() || "default") });
    ask({
      title,
      confirm: "Save",
      input: [element("p", name), element("p", project)],
      words: () => `${words} One with the same name is replaced.`,
      send: () => {
        const one = { project: $("view-project").value.trim(), name: $("dialog-value").value.trim() };
        return put(path(one), document(savedView(keyOf(one))?.view)).then(() => show(keyOf(one)));
      },
    });
  });
  $("drop-view").addEventListener("click", () => {
    const { project, name } = savedView($("views").value);
    ask({
      title: `Delete the view ${name}`,
      confirm: "Delete",
      words: () => `It is deleted for all who see the project ${project}. The jobs stay as they are.`,
      send: () => remove(path({ project, name })).then(() => show("")),
    });
  });
}

// What is wrong with the condition of the page, or nothing.
export function showProblem(text) {
  showText("where-error", text);
  $("where").setAttribute("aria-invalid", String(Boolean(text)));
}
