// What of a page the address keeps, so that a link shows the same: ?axis=time&log=1&zoom=10,200.
import { $ } from "./dom.js";

export const kept = (name) => new URLSearchParams(location.search).get(name);

// An empty value leaves the name out. What follows # stays.
export function keep(name, value) {
  const now = new URLSearchParams(location.search);
  if (value) now.set(name, value);
  else now.delete(name);
  history.replaceState(null, "", `${location.pathname}${now.size ? `?${now}` : ""}${location.hash}`);
}

// Controls take their values from the address, and keep them there unless they are the usual ones. changed(): one has another value.
export function keepControls(names, changed) {
  for (const name of names) {
    const control = $(name),
      field = control.type === "checkbox" ? "checked" : "value",
      usual = control[field];
    if (control.options && kept(name)) offer(control, [kept(name)]);
    if (kept(name) !== null) control[field] = field === "checked" ? kept(name) === "1" : kept(name);
    control.addEventListener("input", () => {
      keep(name, control[field] === usual ? "" : field === "checked" ? String(Number(control.checked)) : control.value);
      changed(name);
    });
  }
}

// Further choices of a list: those that it does not have yet.
export function offer(control, values, wordsOf = (value) => value) {
  const known = new Set([...control.options].map(({ value }) => value));
  control.append(
    ...[...new Set(values)].filter((value) => !known.has(value)).map((value) => new Option(wordsOf(value), value)),
  );
}
