// The views of the table of jobs.
import { $ } from "./dom.js";
import { NOTHING } from "./job_query.js";
import { loadViews, offerViews, savedView, setUpSaving } from "./views.js";

const KEPT = ["where", "sort", "columns", "search", "state", "label", "cluster"];

export function setUpViews(view, change) {
  $("views").addEventListener("change", () => {
    const saved = savedView($("views").value);
    $("drop-view").disabled = !saved;
    change({ ...NOTHING, ...(saved ? { ...saved.view, archived: saved.view.archived ? "true" : "" } : {}) });
  });
  setUpSaving({
    title: "Save this view",
    words: "Condition, order, columns and filters are kept under this name, for all who see the project.",
    usual: () => view.project,
    document: (before) => ({
      ...Object.fromEntries(KEPT.map((key) => [key, view[key]])),
      archived: view.archived === "true",
      workspace: before?.workspace ?? null,
    }),
    shown: offerViews,
  });
  loadViews().then(() => offerViews(""));
}
