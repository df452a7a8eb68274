// The dialog that exports a checkpoint of a job: the command for it, which is copied. actions.js and checkpoints.js call it.
import { choice, field } from "./dialog.js";
import { $, element } from "./dom.js";
import { bytes, whole } from "./format.js";

const NOTHING = "There is nothing to export: the job has no committed checkpoint.";

// `checkpoints`: those that can be exported, the newest first; `others`: the number of those that cannot.
export function exporting(job, checkpoints, others = 0) {
  const title =
    checkpoints.length === 1 ? `Export the checkpoint of step ${whole(checkpoints[0].step)}` : "Export a checkpoint";
  if (!checkpoints.length)
    return {
      title,
      words: () =>
        `${NOTHING}${others ? ` Of its ${whole(others)}, none is whole: the tab Checkpoints says why.` : ""} Run again trains a new job; checkpoint.every_steps sets when it saves.`,
    };
  const options = checkpoints.map(
    (one) => new Option(`step ${whole(one.step)}, ${bytes(one.bytes)}${one.best === 1 ? ", the best" : ""}`, one.step),
  );
  return {
    title,
    confirm: "Copy the command",
    input: [
      element("p.controls", choice("Checkpoint", options)),
      element("p.controls", field("Command", { id: "export-command", readonly: true, size: 44, spellcheck: "false" })),
    ],
    words: (step) => {
      $("export-command").value = `shoal export ${job.id} OUT --step ${step}`;
      return "A page cannot write a directory of your machine, so run this command there. It verifies the checkpoint, reads its model, and writes it to the directory OUT as safetensors and config.json. The checkpoint and the job are not touched.";
    },
    send: copy,
  };
}

// Over HTTP browsers let no page write to the clipboard, unless it is that of this machine.
async function copy() {
  const command = $("export-command");
  command.focus();
  command.select();
  try {
    await navigator.clipboard.writeText(command.value);
  } catch {
    throw new Error("The browser lets this page copy nothing. The command is selected: copy it with Ctrl+C or Cmd+C.");
  }
  return `Copied: ${command.value}`;
}
