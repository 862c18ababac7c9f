// Controls of a request's parameters, built from the ranges that /openapi.json declares.
import { h } from "./dom.js";

const FIRST = ["temperature", "top_p", "max_tokens", "seed", "stop"];
const ELSEWHERE = new Set([
  "model", "stream", "stream_options", "messages", "tools", "response_format", "structured_outputs", "logprobs", "top_logprobs",
  "prompt_logprobs", "n", "json_schema", "functions", "function_call", "user",
]);

/** Reads the declaration of chat completions. */
export function parameters(openapi) {
  const body = openapi.paths["/v1/chat/completions"].post.requestBody.content["application/json"].schema;
  const simple = Object.entries(body.properties).filter(([name, schema]) => !ELSEWHERE.has(name) && kind(schema) !== null);
  const place = ([name]) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
  return simple.sort((a, b) => place(a) - place(b));
}

function kind(schema) {
  if (schema.enum) return "enum";
  if (["number", "integer", "boolean", "string"].includes(schema.type)) return schema.type;
  return schema.anyOf?.[0]?.type === "string" && schema.anyOf[1]?.type === "array" ? "string" : null;
}

/** The controls. `changed` gets the fields that are set; `defaults` are the model's own. */
export function panel(declared, defaults, values, changed) {
  const control = ([name, schema]) => {
    const wanted = kind(schema);
    const id = `set-${name}`;
    const set = (value) => {
      if (value === undefined) delete values[name];
      else values[name] = value;
      changed(values);
    };
    const shown = values[name] === undefined ? "" : String(values[name]);
    let input;
    if (wanted === "boolean" || wanted === "enum") {
      const words = wanted === "boolean" ? ["true", "false"] : schema.enum;
      input = h("select", { id, onchange: () => set(parsed(input.value, wanted)) },
        ["", ...words].map((word) => h("option", { value: word, selected: word === shown }, word === "" ? "default" : word)));
    } else {
      const number = wanted !== "string";
      const step = wanted === "integer" ? 1 : "any";
      input = h("input", {
        id, value: shown, placeholder: String(defaults[name] ?? "default"), ...(number ? { type: "number", step } : {}),
        onchange: () => input.reportValidity() && set(parsed(input.value, wanted)),
      });
      const least = schema.minimum ?? schema.exclusiveMinimum;
      if (number && least !== undefined) input.min = least;
      if (number && schema.maximum !== undefined) input.max = schema.maximum;
    }
    return h("label", { class: "field", title: schema.description ?? "", for: id }, name, input);
  };
  const first = declared.filter(([name]) => FIRST.includes(name)).map(control);
  const others = declared.filter(([name]) => !FIRST.includes(name)).map(control);
  return [...first, h("details", {}, h("summary", {}, `${others.length} further parameters`), others)];
}

function parsed(text, wanted) {
  if (text === "") return undefined;
  if (wanted === "boolean") return text === "true";
  return wanted === "number" || wanted === "integer" ? Number(text) : text;
}
