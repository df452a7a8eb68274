// The registry of models: all versions with their aliases, and of one version its lineage and how serving reads it. The
// address names the open one: #project=default&model=speech&version=3, or an alias in the place of the number.
import { $, button, element, fill, fillFacts, link, rows, said, say, small } from "./dom.js";
import { jobPage, modelPage, modelPath, request, stepPage, whoami } from "./api.js";
import { ask } from "./dialog.js";
import { bytes, moment, number, plural, whole } from "./format.js";
import { fillLineage } from "./lineage.js";
import { deleteAlias, register, removeVersion, setAlias } from "./registering.js";
import { follow } from "./reading.js";

const READ_MS = 5000,
  MOST = 200;
// The service answers 304, without a body, if nothing has changed.
const STATUS = [() => say("live", "live", "run"), () => say("live", "disconnected", "bad")];
const STATES = { damaged: "bad", deleted: "bad", failed: "bad" };
let versions = [],
  shown = "",
  may = new Set();

$("find").addEventListener("input", showAll);
$("register").addEventListener("click", () => ask(register(null, opened)));
addEventListener("hashchange", () => {
  showOne();
  $("version-title").focus();
});
whoami().then((me) => {
  may = new Set(me.permissions);
  $("register").hidden = !changes();
  showAll();
  showOne();
});
follow(() => read().then(...STATUS), READ_MS);

const changes = () => may.has("jobs:change");

async function read() {
  const { items } = await request("/v1/models"),
    text = JSON.stringify(items);
  if (text === shown) return;
  [versions, shown] = [items, text];
  showAll();
  showOne();
}

async function opened(made) {
  await read();
  location.href = modelPage(made);
}

function showAll() {
  const low = $("find").value.trim().toLowerCase();
  const found = versions.filter((one) =>
    [
      one.name,
      one.project,
      one.job_id,
      `${one.name}@${one.version}`,
      ...one.aliases,
      ...one.aliases.map((word) => `${one.name}@${word}`),
      ...one.lineage.slice(0, 1).map((job) => job.name),
    ].some((words) => words.toLowerCase().includes(low)),
  );
  $("none").hidden = versions.length > 0;
  $("found").textContent = versions.length
    ? `${plural(found.length, "version")}${found.length > MOST ? `; the first ${MOST} are shown` : ""}`
    : "";
  rows("versions", found.slice(0, MOST), (one) => [
    element("td.title", [link(one.name, modelPage(one)), one.project === "default" ? "" : small(` in ${one.project}`)]),
    whole(one.version),
    aliases(one),
    origin(one),
    number(one.metrics.loss),
    number(one.metrics.val_loss),
    one.bytes ? bytes(one.bytes) : "–",
    said(`${moment(one.registered_at)} by ${one.registered_by || "–"}`),
    changes() ? buttons(one) : "",
    { class: "row", title: one.description, "data-version": `${one.name}@${one.version}` },
  ]);
}

const named = (one) => one.lineage[0]?.name || one.job_id;
const origin = (one) =>
  said([
    link(`step ${whole(one.step)} of ${named(one)}`, stepPage(one.job_id, one.step)),
    one.state === null ? " (job deleted)" : "",
    STATES[one.state] ? element("span", ` ${one.state}`, { class: STATES[one.state] }) : "",
  ]);
const alias = (one, word) =>
  changes()
    ? button(`${word} ×`, () => ask(deleteAlias(one, word, read)), {
        class: "badge done",
        "data-alias": `${one.name}@${word}`,
        "aria-label": `Delete the alias ${word} of ${one.name}`,
      })
    : element("span.badge.done", word);
const aliases = (one) => {
  const made = one.aliases.map((word) => alias(one, word));
  return made.length ? element("span.labels", made) : "–";
};
const deed = (words, one, label, action, look) =>
  button(words, () => ask(action()), {
    class: look,
    "data-model": `${words.toLowerCase()}-${one.name}-${one.version}`,
    "aria-label": label,
  });
const buttons = (one) =>
  element("span.controls", [
    deed("Alias", one, `Set an alias for ${one.name}@${one.version}`, () => setAlias(one, versions, read)),
    deed("Remove", one, `Remove ${one.name}@${one.version}`, () => removeVersion(one, read), "danger"),
  ]);

function chosen() {
  const asked = new URLSearchParams(location.hash.slice(1)),
    which = asked.get("version") ?? "latest";
  return versions.find(
    (one) =>
      one.project === (asked.get("project") ?? "default") &&
      one.name === asked.get("model") &&
      (which === "latest" || String(one.version) === which || one.aliases.includes(which)),
  );
}

function showOne() {
  const one = chosen();
  $("version").hidden = !one;
  document.title = one ? `${one.name}@${one.version}` : "Shoal: models";
  if (!one) return;
  $("version-title").textContent = `${one.name}@${one.version}${one.project === "default" ? "" : ` in ${one.project}`}`;
  fill("version-aliases", [aliases(one)]);
  $("version-words").textContent = one.description;
  $("version-state").hidden = one.state === "committed";
  $("version-state").textContent =
    one.state === null
      ? "Its job was deleted. The files of the checkpoint were kept, and nothing watches them since."
      : `Its checkpoint is ${one.state}: serving cannot read it. Register another one, and move its aliases.`;
  const [own] = one.lineage,
    parent = own?.parent;
  fillFacts("version-facts", [
    ["Job", link(named(one), jobPage(one.job_id))],
    ["Checkpoint", link(`step ${whole(one.step)}`, stepPage(one.job_id, one.step))],
    parent?.job_id
      ? [
          "Its parent",
          link(
            Number.isInteger(parent.step)
              ? `step ${whole(parent.step)} of ${one.lineage[1]?.name || parent.job_id}`
              : parent.job_id,
            stepPage(parent.job_id, parent.step),
          ),
        ]
      : null,
    ["Size", one.bytes ? bytes(one.bytes) : "–"],
    ["Registered", moment(one.registered_at)],
    ["By", one.registered_by || "–"],
    ...Object.entries(one.metrics).map(([name, value]) => [name, number(value)]),
    ["Where", element("code", one.url)],
  ]);
  fillLineage(one.lineage);
  const which = one.aliases[0] ?? String(one.version),
    project = one.project === "default" ? "" : ` --project ${one.project}`;
  $("get-words").textContent =
    `${one.aliases.length ? `Serving reads the alias ${which}, which moves without a change there.` : "Serving reads an alias, such as prod, which moves without a change there: set one for this version."} It asks with the ETag of the last answer: 304 says that nothing has changed.`;
  $("get-cli").textContent = `shoal model get ${one.name}@${which} --to DIR${project}`;
  $("get-rest").textContent =
    `curl -H "Authorization: Bearer $SHOAL_TOKEN" -H 'If-None-Match: "ETAG"' \\\n  ${location.origin}${modelPath(one)}/${encodeURIComponent(which)}`;
  $("get-python").textContent =
    `from shoal_api.client import Client\n\nwith Client(${JSON.stringify(location.origin)}) as client:\n    version = client.model(${JSON.stringify(one.project)}, ${JSON.stringify(one.name)}, ${JSON.stringify(which)})\n    print(version.url)`;
}
