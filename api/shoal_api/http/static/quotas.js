// The quotas of projects beside what they use, and a dialog that changes them.
import { $, button, element, progress, rows, said } from "./dom.js";
import { put, remove } from "./api.js";
import { ask, choice, field } from "./dialog.js";
import { number, whole } from "./format.js";

let projects = [],
  done = () => {};
$("define").addEventListener("click", () => edit(null));

export function showQuotas(found, may, read) {
  projects = found;
  done = read;
  $("define").hidden = !may;
  rows("projects", found, (one) => [
    element("td.title", said(one.name)),
    one.parent ?? "–",
    used(one.workers, one.limit, `Workers of ${one.name}`),
    one.is_defined ? whole(one.guaranteed) : "–",
    one.is_defined ? number(one.weight) : "–",
    used(one.running, one.max_running, `Running jobs of ${one.name}`),
    used(one.queued, one.max_queued, `Queued jobs of ${one.name}`),
    element("td.title", may ? element("div.controls", buttons(one)) : one.is_defined ? "" : "as the project default"),
    { "data-project": one.name },
  ]);
}

// "3 of 8", with a bar; without a limit the number alone.
function used(count, most, name) {
  if (most === null) return whole(count);
  return element("div", [
    `${whole(count)} of ${whole(most)} `,
    progress(Math.min(count, most), Math.max(1, most), name),
  ]);
}

function buttons(project) {
  return [
    button(project.is_defined ? "Change" : "Define", () => edit(project), {
      "aria-label": `Change the quotas of ${project.name}`,
    }),
    project.is_defined
      ? button("Delete", () => deletion(project.name), {
          class: "danger",
          "aria-label": `Delete the quotas of ${project.name}`,
        })
      : null,
  ];
}

function edit(project) {
  const rule = (words, id, attributes) => element("p.controls", field(words, { id: `quota-${id}`, ...attributes })),
    count = (words, id, value, more) => rule(words, id, { type: "number", min: 0, value, ...more });
  const limit = (words, id, value) => count(words, id, value ?? "", { placeholder: "no limit" });
  const parents = projects
    .filter((one) => one.is_defined && one.name !== project?.name)
    .map((one) => element("option", one.name, { value: one.name, selected: one.name === project?.parent }));
  ask({
    title: project ? `Quotas of ${project.name}` : "Define a project",
    confirm: "Set quotas",
    input: [
      project ? null : rule("Name", "name", { size: 20, placeholder: "speech" }),
      limit("Workers, at most", "limit", project?.limit),
      count("Workers that are guaranteed", "guaranteed", project?.guaranteed ?? 0),
      count("Weight", "weight", project?.weight ?? 1, { step: "any" }),
      limit("Running jobs, at most", "running", project?.max_running),
      limit("Queued jobs, at most", "queued", project?.max_queued),
      element(
        "p.controls",
        choice("Part of", [new Option("no other project", ""), ...parents], { id: "quota-parent" }),
      ),
    ],
    words: "Jobs with more workers than the quotas allow shrink. No job ends.",
    send: () => put(path(project), rules()).then(done),
  });
}

function path(project) {
  const name = project?.name ?? $("quota-name").value.trim();
  if (!name) throw new Error("Say the name of the project.");
  return `/v1/projects/${encodeURIComponent(name)}`;
}

function rules() {
  const most = (id) => ($(`quota-${id}`).value === "" ? null : Number($(`quota-${id}`).value));
  return {
    limit: most("limit"),
    guaranteed: Number($("quota-guaranteed").value),
    weight: Number($("quota-weight").value),
    max_running: most("running"),
    max_queued: most("queued"),
    parent: $("quota-parent").value || null,
  };
}

function deletion(name) {
  ask({
    title: `Delete the quotas of ${name}`,
    confirm: "Delete them",
    words: "The rules of the project default then apply to its jobs. No job ends.",
    send: () => remove(`/v1/projects/${encodeURIComponent(name)}`).then(done),
  });
}
