// The API, as /openapi.json declares it.
import { call, setKey } from "./api.js";
import { button, h } from "./dom.js";

const main = h("main", { class: "docs" }, h("h1", {}, "API"), h("p", {}, h("a", { href: "." }, "Chat"), " · ", h("a", { href: "openapi.json" }, "openapi.json")));
document.body.append(main);

async function show() {
  const { paths } = await (await call("openapi.json")).json();
  for (const [path, methods] of Object.entries(paths)) {
    for (const [method, declared] of Object.entries(methods)) {
      const schema = declared.requestBody?.content?.["application/json"]?.schema;
      main.append(h("details", {}, h("summary", {}, h("b", {}, `${method.toUpperCase()} ${path}`)), h("p", {}, declared.description ?? ""), schema ? fields(schema) : null));
    }
  }
}

function fields(schema) {
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => h("tr", {},
    h("th", { scope: "row" }, name, schema.required?.includes(name) ? " (required)" : ""), h("td", {}, kind(field)), h("td", {}, field.description ?? "")));
  return h("table", {}, h("thead", {}, h("tr", {}, ["field", "values", "meaning"].map((word) => h("th", { scope: "col" }, word)))), h("tbody", {}, rows));
}

function kind(field) {
  if (field.enum) return field.enum.join(" or ");
  if (field.anyOf) return field.anyOf.map(kind).join(" or ");
  const least = field.minimum ?? (field.exclusiveMinimum === undefined ? undefined : `above ${field.exclusiveMinimum}`);
  const range = least === undefined && field.maximum === undefined ? "" : ` (${least ?? ""} to ${field.maximum ?? ""})`;
  return `${field.type ?? "any"}${field.items?.type ? ` of ${field.items.type}` : ""}${range}`;
}

show().catch((error) => {
  if (error.status !== 401) return main.append(h("p", { class: "error", role: "alert" }, error.message));
  const key = h("input", { type: "password", autocomplete: "off", "aria-label": "API key" });
  const form = h("p", {}, "This server needs an API key. ", key, button("Continue", () => {
    setKey(key.value, false);
    form.remove();
    show();
  }));
  main.append(form);
});
