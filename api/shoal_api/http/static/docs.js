// The documentation of the REST API: Swagger UI on /openapi.json, without its validator on another host.
window.SwaggerUIBundle({
  url: "/openapi.json", dom_id: "#api", deepLinking: true, docExpansion: "list", filter: true, validatorUrl: null,
  defaultModelsExpandDepth: 0, tryItOutEnabled: true,
});
