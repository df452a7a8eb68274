// Renders /openapi.json. Loads nothing from other hosts; writes with textContent only.
"use strict";
const $ = (id) => document.getElementById(id);
const MOOD = { get: "good", post: "busy", put: "busy", patch: "warn", delete: "bad" };

function element(name, content, className) {
  const made = document.createElement(name);
  if (content !== undefined && content !== null) made.append(...[content].flat());
  if (className) made.className = className;
  return made;
}
function table(heads, rows) {
  const head = element("tr", heads.map((text) => element("th", text)));
  const body = rows.map((cells) => element("tr", cells.map((cell) => element("td", cell))));
  return element("table", [element("thead", head), element("tbody", body)]);
}
function type(schema) {
  if (!schema) return "";
  if (schema.$ref) {
    const name = schema.$ref.split("/").pop();
    const link = element("a", name);
    link.href = `#schema-${name}`;
    return link;
  }
  const choice = schema.anyOf || schema.oneOf;
  if (choice) return element("span", choice.flatMap((one, index) => (index ? [" | ", type(one)] : [type(one)])));
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return element("span", ["list of ", type(schema.items || {})]);
  const limits = [["≥", schema.minimum], [">", schema.exclusiveMinimum], ["≤", schema.maximum], ["<", schema.exclusiveMaximum]]
    .filter(([, limit]) => limit !== undefined).map(([sign, limit]) => `${sign} ${limit}`).join(", ");
  return (schema.type || "any") + (limits ? ` (${limits})` : "");
}

function route(path, verb, operation) {
  const box = element("details");
  box.append(element("summary", [element("span", verb.toUpperCase(), `verb ${MOOD[verb]}`), element("code", path), " ",
    element("span", operation.summary || "", "dim")]));
  const inside = element("div", element("p", operation.description || ""));
  const parameters = operation.parameters || [];
  if (parameters.length) {
    inside.append(element("h3", "Parameters"), table(["Name", "In", "Type", "Default", ""], parameters.map((one) => [
      element("code", one.name + (one.required ? " *" : "")), one.in, type(one.schema),
      one.schema.default === undefined || one.schema.default === null ? "" : JSON.stringify(one.schema.default), one.description || ""])));
  }
  if (operation.requestBody) {
    inside.append(element("h3", "Body"), table(["Content-Type", "Schema"],
      Object.entries(operation.requestBody.content).map(([media, { schema }]) => [element("code", media), type(schema)])));
  }
  inside.append(element("h3", "Answers"), table(["Status", "", "Schema"], Object.entries(operation.responses).map(([status, answer]) => [
    status === "default" ? "4xx, 5xx" : status, answer.$ref ? "application/problem+json" : answer.description,
    answer.$ref ? type({ $ref: "#/components/schemas/Problem" }) : type(Object.values(answer.content || {})[0]?.schema)])));
  if (verb === "get") inside.append(element("h3", "Try it"), attempt(path, parameters));
  box.append(inside);
  return box;
}

function attempt(path, parameters) {
  const form = element("form");
  const inputs = parameters.filter((one) => one.in !== "header").map((one) => {
    const input = element("input");
    input.placeholder = one.name;
    input.setAttribute("aria-label", one.name);
    form.append(input, " ");
    return [one, input];
  });
  const output = element("pre");
  output.hidden = true;
  form.append(element("button", "GET"), output);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    let url = path;
    const query = new URLSearchParams();
    for (const [one, input] of inputs) {
      if (one.in === "path") url = url.replace(`{${one.name}}`, encodeURIComponent(input.value));
      else if (input.value) query.append(one.name, input.value);
    }
    output.hidden = false;
    output.textContent = "…";
    const control = new AbortController();
    const timer = setTimeout(() => control.abort(), 10000);  // a stream may never end
    try {
      const answer = await fetch(url + (query.size ? `?${query}` : ""), { signal: control.signal, headers: { Accept: "application/json" } });
      const text = await answer.text();
      let shown = text;
      try { shown = JSON.stringify(JSON.parse(text), null, 2); } catch { /* not JSON */ }
      output.textContent = `${answer.status} ${answer.headers.get("content-type") || ""}\n\n${shown}`;
    } catch (error) { output.textContent = String(error); }
    clearTimeout(timer);
  });
  return form;
}

function schemaBox(name, schema) {
  const box = element("details");
  box.id = `schema-${name}`;
  box.append(element("summary", element("code", name)));
  const inside = element("div", element("p", schema.description || ""));
  const required = new Set(schema.required || []);
  if (schema.properties) {
    inside.append(table(["Key", "Type", "Default", ""], Object.entries(schema.properties).map(([key, one]) => [
      element("code", key + (required.has(key) ? " *" : "")), type(one), one.default === undefined ? "" : JSON.stringify(one.default), one.description || ""])));
  } else inside.append(element("p", type(schema)));
  box.append(inside);
  return box;
}

async function render() {
  const [api, problems] = await Promise.all(["/openapi.json", "/problems"].map(async (url) => (await fetch(url)).json()));
  $("version").textContent = api.info.version;
  $("about").textContent = api.info.description;
  $("routes").replaceChildren(...api.tags.flatMap((tag) => [
    element("h2", [tag.name, element("span", ` ${tag.description}`, "dim")]),
    ...Object.entries(api.paths).flatMap(([path, verbs]) => Object.entries(verbs)
      .filter(([, operation]) => (operation.tags || []).includes(tag.name)).map(([verb, operation]) => route(path, verb, operation)))]));
  $("problems").replaceChildren(...problems.map((one) => element("tr", [one.status, element("code", one.type), one.title, one.meaning]
    .map((cell) => element("td", cell)))));
  $("schemas").replaceChildren(...Object.entries(api.components.schemas).sort().map(([name, schema]) => schemaBox(name, schema)));
  reveal();
}

function reveal() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target) { target.open = true; target.scrollIntoView(); }
}

addEventListener("hashchange", reveal);
$("filter").addEventListener("input", () => {
  for (const box of document.querySelectorAll("#routes details, #schemas details")) {
    box.hidden = !box.textContent.toLowerCase().includes($("filter").value.toLowerCase());
  }
});
render();
