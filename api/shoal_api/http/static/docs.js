// The documentation of the REST API: Swagger UI on /openapi.json, without its validator on another host.
import { csrfToken } from "./api.js";

window.SwaggerUIBundle({
  requestInterceptor: async (request) => {
    if (request.method && request.method !== "GET") request.headers["X-CSRF-Token"] = await csrfToken();
    return request;
  },
  url: "/openapi.json",
  dom_id: "#api",
  deepLinking: true,
  docExpansion: "list",
  filter: true,
  validatorUrl: null,
  defaultModelsExpandDepth: 0,
  tryItOutEnabled: true,
});
