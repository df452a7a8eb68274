// What differs between two documents, by the path of each key. Pure.
export function differences(before, after) {
  const [from, to] = [flat(before), flat(after)];
  return [...new Set([...Object.keys(from), ...Object.keys(to)])]
    .sort()
    .filter((path) => from[path] !== to[path])
    .map((path) => [path, from[path] ?? "–", to[path] ?? "–"]);
}

export function flat(value, path = "", found = {}) {
  if (value !== null && typeof value === "object" && !Array.isArray(value))
    for (const [key, inner] of Object.entries(value)) flat(inner, path ? `${path}.${key}` : key, found);
  else found[path] = JSON.stringify(value);
  return found;
}
