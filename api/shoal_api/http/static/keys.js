// The keys of a page: each is declared with its words by the module that acts on it, and the help (?) lists them all.
// A key does nothing while one writes, or while a dialog is open.
const declared = [
    ["/", "search everything"],
    ["?", "this help"],
    ["Esc", "close"],
  ],
  actions = new Map();

export function onKey(key, words, act) {
  declared.splice(declared.length - 1, 0, [key, words]);
  actions.set(key, act);
}
// Keys of a control, which handles them itself.
export function describeKeys(keys, words) {
  declared.splice(declared.length - 1, 0, [keys, words]);
}
export const keysOfPage = () => [...declared];
export const bind = (key, act) => actions.set(key, act);

const isModified = (event) => event.ctrlKey || event.metaKey || event.altKey;
function press(event, act) {
  if (!act || isModified(event)) return;
  event.preventDefault();
  act(event);
}
// Keys of a control: what each does while the control has the focus.
export const onKeys = (control, acts) => control.addEventListener("keydown", (event) => press(event, acts[event.key]));

addEventListener(
  "keydown",
  (event) => {
    const isWriting = event.target.closest("input, textarea, select, [contenteditable]");
    if (!isWriting && !document.querySelector("dialog[open]")) press(event, actions.get(event.key));
  },
  { capture: true },
);
