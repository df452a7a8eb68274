// Alerts of a job. The browser says when one is raised and when the job ends, if somebody has asked for it here: the page must
// be open in a tab, also one that nobody looks at.
import { $, element } from "./dom.js";
import { sentence } from "./job_sentence.js";
import { ENDED } from "./states.js";

let isWanted = false,
  state = null,
  toldAt = null;

$("notify").addEventListener("click", async () => {
  isWanted = !isWanted && (await Notification.requestPermission()) === "granted";
  $("notify").setAttribute("aria-pressed", String(isWanted));
  $("notify-said").textContent = isWanted
    ? "At its end and at its alerts. Keep this page open in a tab."
    : Notification.permission === "denied"
      ? "The browser lets this page show none. Webhooks send mail and chat messages."
      : "";
});

const say = (job, title, body, tag) => new Notification(`${job.name}: ${title}`, { body, tag: `${job.id}${tag}` });

// With each state that is read.
export function noteState(job) {
  const { state: now, alerts } = job.status,
    before = toldAt ?? Infinity;
  $("notify").hidden = ENDED.has(now) || !("Notification" in window); // none without HTTPS, except on this machine
  for (const { condition, step, told_at: at } of isWanted ? alerts : [])
    if (at > before) say(job, condition, `Since step ${step}.`, condition);
  if (isWanted && state !== now && ENDED.has(now)) {
    isWanted = false;
    say(job, now, sentence(job), "");
  }
  state = now;
  toldAt = Math.max(0, ...alerts.map(({ told_at: at }) => at ?? 0));
}

// The dialog that sets them.
export const alerting = ({ spec }, send) => ({
  title: "Alerts",
  confirm: "Set alerts",
  input: [
    element("label", [
      "Conditions, one a line: loss > 10 ",
      element("textarea", (spec.alerts ?? []).join("\n"), { id: "dialog-value", rows: 4, spellcheck: "false" }),
    ]),
  ],
  words:
    "When one begins to hold, the job has an event: webhooks send it as mail or chat message, and Notify me shows it.",
  send: (text) => send(text.split("\n").filter((line) => line.trim())),
});
