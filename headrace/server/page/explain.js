// Why an answer is as it is: where its time went, what the cache had, and why it ended.
import { call } from "./api.js";
import { h } from "./dom.js";

const PHASES = [["waited", "queue_ms"], ["prompt", "prompt_ms"], ["answer", "generation_ms"]];

/** @param id of the answer. @param model that gave it: a server may have several. */
export function explainView(id, model) {
  const place = h("section", { "aria-label": "explanation" }, h("p", { class: "dim", role: "status" }, "asking the server\u2026"));
  call(`v1/explain/${encodeURIComponent(id)}?model=${encodeURIComponent(model)}`).then((answer) => answer.json()).then((found) => place.replaceChildren(...shown(found)))
    .catch((error) => place.replaceChildren(h("p", { class: "error", role: "alert" }, error.message)));
  return place;
}

function shown(found) {
  const phases = PHASES.map(([name, field], at) => [name, found[field], at]).filter(([, value]) => value !== null);
  const bars = phases.map(([, value, at]) => {
    const bar = h("span", { class: `phase${at}` });
    bar.style.flexGrow = String(Math.max(value, 0.001));
    return bar;
  });
  const versions = [...new Set(found.samples.flatMap((sample) => sample.weight_versions.map((span) => span.version)))];
  const rows = [...phases.map(([name, value, at]) => [name, `${value.toFixed(1)} ms`, at]), ...(versions.length ? [["weights", versions.join(", ")]] : [])];
  return [
    h("div", { class: "phases", "aria-hidden": "true" }, bars),
    h("table", {}, h("tbody", {}, rows.map(([name, value, at]) => h("tr", {}, h("th", { scope: "row" }, at === undefined ? null : h("span", { class: `key phase${at}` }), name), h("td", {}, value))))),
    h("ul", {}, found.reasons.map((reason) => h("li", {}, reason))),
    found.attention ? densities(found.attention) : null,
  ].filter((part) => part !== null);
}

/** The density of each layer of a prompt that attended sparsely. */
function densities({ layers }) {
  const cells = layers.map((density, at) => {
    const cell = h("span", { title: `layer ${at}: ${density === null ? "dense" : density.toFixed(3)}` });
    cell.style.opacity = density === null ? "" : String(0.15 + 0.85 * Math.sqrt(density));
    return cell;
  });
  const text = layers.map((density, at) => `layer ${at} ${density === null ? "dense" : density.toFixed(2)}`).join(", ");
  return h("div", { class: "layers", role: "img", "aria-label": `density by layer: ${text}` }, cells);
}
