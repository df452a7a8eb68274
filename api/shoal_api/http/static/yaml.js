// A document as YAML, as people write specs: a line for each key, lists in brackets, texts in quotes. Pure.
export function yaml(value, indent = "") {
  return Object.entries(value)
    .map(([key, inner]) =>
      isNested(inner)
        ? `${indent}${named(key)}:\n${yaml(inner, `${indent}  `)}`
        : `${indent}${named(key)}: ${flow(inner)}\n`,
    )
    .join("");
}

const isNested = (value) =>
  value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length > 0;
const named = (key) =>
  /^[A-Za-z_][\w.-]*$/.test(key) && !/^(y|n|yes|no|on|off|true|false|null)$/i.test(key) ? key : JSON.stringify(key);

function flow(value) {
  if (Array.isArray(value)) return `[${value.map(flow).join(", ")}]`;
  if (value !== null && typeof value === "object")
    return `{${Object.entries(value)
      .map(([key, inner]) => `${named(key)}: ${flow(inner)}`)
      .join(", ")}}`;
  // YAML 1.1 takes 1e-7 for a text: its numbers have a point.
  return typeof value === "number" ? String(value).replace(/^(-?\d+)e/, "$1.0e") : JSON.stringify(value);
}
