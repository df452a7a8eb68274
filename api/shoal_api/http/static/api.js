// Requests to the service. A problem document becomes an Error with its words.
export async function request(path, { method = "GET", body, type = "application/json" } = {}) {
  const headers = { Accept: "application/json" };
  if (body !== undefined) headers["Content-Type"] = type;
  const text = body === undefined || typeof body === "string" ? body : JSON.stringify(body);
  const answer = await fetch(path, { method, headers, body: text });
  const document = (answer.headers.get("content-type") || "").includes("json") ? await answer.json() : null;
  if (!answer.ok) {
    const errors = (document?.errors || []).map((one) => `${one.path || "spec"}: ${one.message}`);
    throw Object.assign(new Error([document?.detail || `status ${answer.status}`, ...errors].join("\n")), { status: answer.status });
  }
  return document;
}
export const jobPath = (id) => `/v1/jobs/${encodeURIComponent(id)}`;
export const jobPage = (id) => `/jobs/${encodeURIComponent(id)}`;
