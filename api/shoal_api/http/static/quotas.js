// The quotas of projects beside what they use, and a dialog that changes them.
import { $, button, element, rows, said } from "./dom.js";
import { request } from "./api.js";
import { ask } from "./dialog.js";
import { number, whole } from "./format.js";

let projects = [],
  done = () => {};
$("define").addEventListener("click", () => edit(null));

export function showQuotas(found, may, read) {
  projects = found;
  done = read;
  $("define").hidden = !may;
  rows(
    "projects",
    found,
    (one) => [
      element("td", said(one.name), { class: "title" }),
      one.parent ?? "–",
      used(one.workers, one.limit, `Workers of ${one.name}`),
      one.is_defined ? whole(one.guaranteed) : "–",
      one.is_defined ? number(one.weight) : "–",
      used(one.running, one.max_running, `Running jobs of ${one.name}`),
      used(one.queued, one.max_queued, `Queued jobs of ${one.name}`),
      element(
        "td",
        may ? element("div", buttons(one), { class: "controls" }) : one.is_defined ? "" : "as the project default",
        { class: "title" },
      ),
    ],
    (one) => ({ "data-project": one.name }),
  );
}

// "3 of 8", with a bar; without a limit the number alone.
function used(count, most, name) {
  if (most === null) return whole(count);
  return element("div", [
    `${whole(count)} of ${whole(most)} `,
    element("progress", null, { max: Math.max(1, most), value: Math.min(count, most), "aria-label": name }),
  ]);
}

function buttons(project) {
  return [
    button(project.is_defined ? "Change" : "Define", () => edit(project), {
      "aria-label": `Change the quotas of ${project.name}`,
    }),
    ...(project.is_defined
      ? [
          button("Delete", () => remove(project.name), {
            class: "danger",
            "aria-label": `Delete the quotas of ${project.name}`,
          }),
        ]
      : []),
  ];
}

function edit(project) {
  const field = (title, id, attributes) =>
    element("p", [element("label", [`${title} `, element("input", null, { id: `quota-${id}`, ...attributes })])], {
      class: "controls",
    });
  const limit = (title, id, value) =>
    field(title, id, { type: "number", min: 0, value: value ?? "", placeholder: "no limit" });
  const parents = projects
    .filter((one) => one.is_defined && one.name !== project?.name)
    .map((one) => element("option", one.name, { value: one.name, selected: one.name === project?.parent }));
  ask({
    title: project ? `Quotas of ${project.name}` : "Define a project",
    confirm: "Set quotas",
    input: [
      ...(project ? [] : [field("Name", "name", { size: 20, placeholder: "speech" })]),
      limit("Workers, at most", "limit", project?.limit),
      field("Workers that are guaranteed", "guaranteed", { type: "number", min: 0, value: project?.guaranteed ?? 0 }),
      field("Weight", "weight", { type: "number", min: 0, step: "any", value: project?.weight ?? 1 }),
      limit("Running jobs, at most", "running", project?.max_running),
      limit("Queued jobs, at most", "queued", project?.max_queued),
      element(
        "p",
        [
          element("label", [
            "Part of ",
            element("select", [element("option", "no other project", { value: "" }), ...parents], {
              id: "quota-parent",
            }),
          ]),
        ],
        { class: "controls" },
      ),
    ],
    words: async () => "Jobs with more workers than the quotas allow shrink. No job ends.",
    send: async () => {
      await request(path(project), { method: "PUT", body: rules() });
      await done();
    },
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

function remove(name) {
  ask({
    title: `Delete the quotas of ${name}`,
    confirm: "Delete them",
    words: async () => "The rules of the project default then apply to its jobs. No job ends.",
    send: async () => {
      await request(`/v1/projects/${encodeURIComponent(name)}`, { method: "DELETE" });
      await done();
    },
  });
}
