// The spec, and what changed between two of its versions.
import { $, element, fill, fillEach } from "./dom.js";
import { jobPath, request } from "./api.js";
import { moment } from "./format.js";
import { differences } from "./differences.js";

let versions = [],
  wanted = 0;
for (const name of ["version", "against"]) $(name).addEventListener("change", show);
$("copy-spec").addEventListener("click", () =>
  navigator.clipboard.writeText($("spec").textContent).then(
    () => {
      $("spec-copied").textContent = "Copied.";
    },
    (error) => {
      $("spec-copied").textContent = error.message;
    },
  ),
);

export async function showSpec(job) {
  if (wanted === job.spec_version) return;
  wanted = job.spec_version;
  try {
    versions = (await request(`${jobPath(job.id)}/specs`)).items;
  } catch {
    wanted = 0;
    return;
  } // asked again with the next change of the job
  const options = (chosen) =>
    versions.map(
      (one) => new Option(`${one.version}, ${moment(one.accepted_at)}`, one.version, false, one.version === chosen),
    );
  fill("version", options(wanted));
  fill("against", options(Math.max(1, wanted - 1)));
  show();
}

function show() {
  const of = (name) => versions.find((one) => String(one.version) === $(name).value);
  const [now, before] = [of("version"), of("against")];
  if (!now) return;
  $("spec").textContent = now.yaml;
  $("download-spec").href = `data:application/yaml,${encodeURIComponent(now.yaml)}`;
  const changes = before && before !== now ? differences(before.spec, now.spec) : [];
  fillEach("changes", changes, ([path, from, to]) =>
    element("li", [element("code", path), " ", element("span.minus", from), " → ", element("span.plus", to)]),
  );
}
