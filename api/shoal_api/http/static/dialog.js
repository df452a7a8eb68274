// The dialog of the buttons: what will happen and what it costs, in words, before anything does.
import { $, element, fill, placeOf, returnTo } from "./dom.js";
import { latest } from "./reading.js";

let current = null,
  opener = null;

// { title, confirm, input: [nodes], words, send: async (value) => done }; the value is that of #dialog-value. `words`: a text, or what
// makes one of the value, also later. `confirm`: the words of the button, if they are not the title. Without `send` there is nothing to do
// but to read. A text that `send` returns is shown, and the dialog stays open.
export function ask(action) {
  current = action;
  $("dialog-title").textContent = action.title;
  fill("dialog-input", action.input);
  $("dialog-words").textContent = "";
  $("confirm").textContent = action.confirm ?? action.title;
  $("confirm").hidden = !action.send;
  $("dialog-error").textContent = "";
  explain();
  opener = placeOf(document.activeElement);
  $("dialog").showModal();
}

// A field of the dialog with its words.
export const field = (words, attributes = {}) =>
  element("label", [`${words} `, element("input", null, { id: "dialog-value", ...attributes })]);

export const choice = (words, options, attributes = {}) =>
  element("label", [`${words} `, element("select", options, { id: "dialog-value", ...attributes })]);

// The words of an open dialog are said anew: what they are about has changed.
export function refresh() {
  if ($("dialog").open) explain();
}

// The answer about an older input may come later.
const explain = latest(
  async () => {
    const { words } = current;
    try {
      return typeof words === "function" ? await words($("dialog-value")?.value) : words;
    } catch (error) {
      return error.message;
    }
  },
  (words) => {
    $("dialog-words").textContent = words;
  },
);

$("dialog-input").addEventListener("input", explain, true);

$("dismiss").addEventListener("click", () => $("dialog").close());
$("dialog").addEventListener("close", () => returnTo(opener)); // the browser does it, unless the opener was replaced meanwhile
$("confirm").addEventListener("click", async () => {
  $("confirm").disabled = true;
  $("dialog-error").textContent = "";
  try {
    const said = await current.send($("dialog-value")?.value);
    if (typeof said === "string") $("dialog-words").textContent = said;
    else $("dialog").close();
  } catch (error) {
    $("dialog-error").textContent = error.message;
  }
  $("confirm").disabled = false;
  if ($("dialog").open && !$("dialog-input").contains(document.activeElement)) $("confirm").focus(); // a disabled button has lost the focus
});
