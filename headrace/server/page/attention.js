// How the tokens of a conversation attend to each other: a heat map, and the tokens shaded for the one that is chosen.
import { call } from "./api.js";
import { button, h } from "./dom.js";
import { roving } from "./message.js";

const HEAT = [30, 120, 180]; // seen through on both backgrounds
const DEEPEST = 0.35; // of a token's shade, on which its text stays readable

/** @param body the request of a chat completion whose last message is the answer. */
export function attentionView(body) {
  const layer = number("layer", "0"), head = number("head", "mean");
  const status = h("p", { class: "dim", role: "status" }, "computing\u2026");
  const place = h("div");
  const show = async () => {
    if (!layer.reportValidity() || !head.reportValidity()) return;
    status.textContent = "computing\u2026";
    const query = `layer=${layer.value || 0}${head.value === "" ? "" : `&head=${head.value}`}`;
    const request = { ...body, add_generation_prompt: false, continue_final_message: true };
    try {
      const answer = await call(`v1/chat/completions/attention?${query}`, { method: "POST", body: JSON.stringify(request) });
      const found = await answer.json();
      [layer.max, head.max] = [found.num_layers - 1, found.num_heads - 1];
      status.textContent = `layer ${found.layer} of ${found.num_layers}, ${found.head === null ? `mean of ${found.num_heads} heads` : `head ${found.head} of ${found.num_heads}`}`;
      place.replaceChildren(...drawn(found.tokens, numbers(found.weights)));
    } catch (error) {
      place.replaceChildren();
      status.textContent = error.message;
    }
  };
  show();
  return h("section", { "aria-label": "attention" },
    h("div", { class: "row" }, h("label", {}, "layer ", layer), h("label", {}, "head ", head), button("Show", show)), status, place);
}

function number(name, placeholder) {
  return h("input", { type: "number", min: 0, step: 1, class: "short", placeholder, "aria-label": name });
}

function numbers(base64) {
  const text = atob(base64);
  const bytes = Uint8Array.from(text, (character) => character.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}

/** The elements of the map. `weights`: a row of each token's, one behind the other. */
function drawn(tokens, weights) {
  const size = tokens.length;
  const line = h("div", { class: "alternatives", role: "status" });
  const choose = (at) => {
    const row = weights.subarray(at * size, at * size + at + 1);
    const most = Math.max(...row, 1e-9);
    spans.forEach((span, other) => {
      const share = other <= at ? row[other] / most : 0;
      span.style.backgroundColor = share > 0.02 ? `rgba(${HEAT}, ${(DEEPEST * Math.sqrt(share)).toFixed(3)})` : "";
      span.classList.toggle("chosen", other === at);
    });
    const best = [...row.keys()].sort((a, b) => row[b] - row[a]).slice(0, 5);
    line.textContent = `${JSON.stringify(tokens[at])} attends to ${best.map((other) => `${JSON.stringify(tokens[other])} ${(100 * row[other]).toFixed(1)} %`).join("   ")}`;
  };
  const spans = tokens.map((token, at) => h("span", { tabIndex: at === size - 1 ? 0 : -1, onmouseenter: () => choose(at), onfocus: () => choose(at) }, token));
  const canvas = h("canvas", { class: "map", width: size, height: size, role: "img", "aria-label": `attention of ${size} tokens, from top to bottom, to those at their left`,
    onmousemove: (event) => choose(Math.min(size - 1, Math.floor((event.offsetY * size) / canvas.clientHeight))) });
  paint(canvas, weights, size);
  choose(size - 1);
  return [canvas, h("p", { class: "tokens", role: "group", "aria-label": "tokens by attention", onkeydown: roving(spans) }, spans), line];
}

function paint(canvas, weights, size) {
  const context = canvas.getContext("2d");
  const image = context.createImageData(size, size);
  weights.forEach((weight, at) => {
    image.data.set(HEAT, 4 * at);
    image.data[4 * at + 3] = 255 * Math.sqrt(Math.min(1, weight));
  });
  context.putImageData(image, 0, 0);
}
