// The dialog of the buttons: what will happen and what it costs, in words, before anything does.
import { $, element, placeOf, returnTo } from "./dom.js";

let current = null,
  opener = null,
  asked = 0;

// { title, confirm, input: [nodes], words: async (value) => text, send: async (value) => done }; the value is that of #dialog-value.
// Without `confirm` there is nothing to do but to read. A text that `send` returns is shown, and the dialog stays open.
export function ask(action) {
  current = action;
  $("dialog-title").textContent = action.title;
  $("dialog-input").replaceChildren(...(action.input ?? []));
  $("dialog-words").textContent = "";
  $("confirm").textContent = action.confirm ?? "";
  $("confirm").hidden = !action.confirm;
  $("dialog-error").textContent = "";
  explain();
  opener = placeOf(document.activeElement);
  $("dialog").showModal();
}

// A field of the dialog with its words.
export const field = (words, attributes = {}) =>
  element("label", [`${words} `, element("input", null, { id: "dialog-value", ...attributes })]);

// The words of an open dialog are said anew: what they are about has changed.
export function refresh() {
  if ($("dialog").open) explain();
}

async function explain() {
  const number = ++asked; // the answer about an older input may come later
  let words;
  try {
    words = await current.words($("dialog-value")?.value);
  } catch (error) {
    words = error.message;
  }
  if (number === asked) $("dialog-words").textContent = words;
}

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
