// The form for a new job: the service checks the YAML while one types, and the planner predicts its layouts.
import { $, attempt, fill, link, rows, say } from "./dom.js";
import { jobPage, jobPath, post, request, validated } from "./api.js";
import { bytes, joined, number, seconds } from "./format.js";
import { showPreview } from "./data_preview.js";
import { ENDED } from "./states.js";
import { setUpTabs } from "./tabs.js";
import { example, submitNew } from "./new_job.js";

const PAUSE_MS = 400,
  POLL_MS = 1000;
// What of a spec decides what is read, and where.
const READ = [
  "task",
  "code",
  "secrets",
  "model",
  "data",
  "batch",
  "validation",
  "seed",
  "worker",
  "checkpoint",
  "timeouts",
  "project",
  "user",
  "priority",
];
let timer = null,
  turn = 0,
  valid = null,
  isReading = false;

export function setUpSubmission() {
  $("yaml").value = sessionStorage.getItem("shoal.spec") || example("my-job");
  $("new").addEventListener("click", () => {
    $("submission").hidden = false;
    $("yaml").focus();
    check();
  });
  $("close").addEventListener("click", () => {
    $("submission").hidden = true;
    $("new").focus();
  });
  $("yaml").addEventListener("input", () => {
    sessionStorage.setItem("shoal.spec", $("yaml").value);
    clearTimeout(timer);
    timer = setTimeout(check, PAUSE_MS);
  });
  $("submit").addEventListener("click", () => attempt(() => submitNew($("yaml").value), "verdict", "submit"));
  $("read-data").addEventListener("click", () =>
    readData(valid)
      .catch((error) => {
        $("data-said").textContent = error.message;
      })
      .finally(() => {
        isReading = false;
        allowReading();
      }),
  );
  setUpTabs($("submission-tabs"), () => {});
}

async function check() {
  const mine = ++turn,
    body = $("yaml").value;
  try {
    const found = await validated(body);
    if (mine !== turn) return;
    say("verdict", found.valid ? "The spec is valid." : found.words, found.valid ? "done" : "error");
    $("submit").disabled = !found.valid;
    valid = found.valid ? found.spec : null;
    allowReading();
    if (found.valid) await plan(found.spec, mine);
    else $("plan").replaceChildren();
  } catch (error) {
    if (mine === turn) {
      say("verdict", error.message, "error");
      $("plan").replaceChildren();
    }
  }
}

async function plan(spec, mine) {
  const found = await post("/v1/plans", { spec, workers: spec.elasticity.max_workers, top: 8 });
  if (mine !== turn) return;
  $("plan-words").textContent =
    `${spec.elasticity.max_workers} workers: ${found.choice.name}. ${found.choice.reason} ${found.ranking.note}`;
  rows("plan", found.ranking.predictions, (one) => [
    one.name,
    seconds(one.step_s),
    number(one.tokens_per_s, 3),
    bytes(one.memory_bytes),
  ]);
}

const allowReading = () => {
  $("read-data").disabled = isReading || !valid || Boolean(valid.script || valid.loop);
};

// A job that ends as soon as it has described the data: it runs where the data is, as the user whose job reads it.
async function readData(spec) {
  isReading = true;
  allowReading();
  $("data-preview").replaceChildren();
  const body = {
    ...Object.fromEntries(READ.map((key) => [key, spec[key]])),
    name: `${spec.name.slice(0, 58)}-data`,
    labels: { "data-of": spec.name },
    stop: { steps: 1 },
    elasticity: { min_workers: 1, max_workers: 1 },
    retry: { max_failures: 0 },
  };
  const { id, name } = await post("/v1/jobs", body);
  const tell = (text) => fill("data-said", [link(name, jobPage(id)), ` ${text}`]);
  for (
    let ended = false;
    !(await showPreview(id));
    await new Promise((done) => {
      setTimeout(done, POLL_MS);
    })
  ) {
    if (ended) return;
    const { status } = await request(jobPath(id));
    ended = ENDED.has(status.state); // it may have described the data meanwhile
    tell(joined([status.state, status.message], ": "));
  }
  tell("has read the data.");
  await post(`${jobPath(id)}/cancel`).catch(() => {});
}
