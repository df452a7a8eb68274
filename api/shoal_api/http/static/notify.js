// The browser says when the job ends, if somebody has asked for it here. The page must be open in a tab, also one that nobody looks at.
import { $ } from "./dom.js";
import { sentence } from "./job_sentence.js";
import { ENDED } from "./states.js";

let isWanted = false,
  state = null;

$("notify").addEventListener("click", async () => {
  isWanted = !isWanted && (await Notification.requestPermission()) === "granted";
  $("notify").setAttribute("aria-pressed", String(isWanted));
  $("notify-said").textContent = isWanted
    ? "Keep this page open in a tab."
    : Notification.permission === "denied"
      ? "The browser lets this page show none. Webhooks send mail and chat messages."
      : "";
});

// With each state that is read.
export function noteState(job) {
  const now = job.status.state;
  $("notify").hidden = ENDED.has(now) || !("Notification" in window); // none without HTTPS, except on this machine
  if (isWanted && state !== now && ENDED.has(now)) {
    isWanted = false;
    new Notification(`${job.name}: ${now}`, { body: sentence(job), tag: job.id });
  }
  state = now;
}
