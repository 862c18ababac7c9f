// The page: conversations at the left, the chat, and settings at the right.
import { ApiError, call, metrics, setKey, stream } from "./api.js";
import { button, h, sparkline } from "./dom.js";
import { Growing, messageView } from "./message.js";
import { panel, parameters } from "./settings.js";
import * as store from "./store.js";

const LARGEST_SIDE = 1536; // pixels of a picture, which is made smaller before it is sent
const settings = load();
let talks = [], talk = store.conversation(), models = [], declared = [], running = null, pictures = [], editing = null;

const list = h("ul", {});
const log = h("div", { class: "log", role: "log", "aria-label": "conversation", tabIndex: 0 });
const input = h("textarea", { "aria-label": "Message", placeholder: "Message", rows: 2, onkeydown: onKey, onpaste: (event) => takeFiles(event.clipboardData.files, event) });
const files = h("input", { type: "file", accept: "image/*,video/*", multiple: true, class: "visually-hidden", tabIndex: -1, "aria-hidden": "true", onchange: () => takeFiles(files.files) });
const shots = h("div", { class: "shots" });
const send = button("Send", submit, { class: "main" });
const model = h("select", { "aria-label": "Model", onchange: () => { save({ model: model.value }); describe(); } });
const status = h("span", { class: "dim", role: "status" });
const sampling = h("div"), tiles = h("div", { class: "tiles" });
const system = area("System message", "system", "You are a helpful assistant.");
const schema = area("JSON Schema of the answers", "schema", '{"type": "object", "properties": {}}');
const tools = area("Tools, as a JSON list", "tools", '[{"type": "function", "function": {"name": "…", "parameters": {}}}]');
const logprobs = h("input", { type: "checkbox", id: "logprobs", checked: !!settings.logprobs, onchange: () => save({ logprobs: logprobs.checked }) });

const composer = h("form", { class: "composer", onsubmit: submit, ondragover: (event) => dragged(event, true), ondragleave: (event) => dragged(event, false), ondrop },
  shots, h("div", { class: "row" }, input, button("Add picture", () => files.click()), files, send));
const wide = matchMedia("(min-width: 60rem)");
const app = h("div", { class: `app${wide.matches && settings.side !== false ? " side" : ""}` },
  h("header", {}, h("h1", {}, "headrace"), model, status, h("span", { class: "space" }),
    button("Conversations", () => toggle("list", "side")), button("Settings", () => save({ side: toggle("side", "list") })),
    h("a", { href: "docs" }, "API")),
  h("nav", { "aria-label": "Conversations" }, button("New conversation", begin), list),
  h("main", {}, log, composer),
  h("aside", { "aria-label": "Settings" }, h("h2", {}, "Instructions"), system.label, h("h2", {}, "Sampling"), sampling,
    h("label", { class: "field", for: "logprobs" }, "token probabilities", logprobs),
    h("h2", {}, "Form of the answer"), schema.label, h("h2", {}, "Tools"), tools.label, h("h2", {}, "Server"), tiles));
document.body.append(app);

/** Opens or closes a panel; on a narrow screen it is the only one. */
function toggle(name, other) {
  if (!wide.matches) app.classList.remove(other);
  return app.classList.toggle(name);
}

function load() {
  try {
    return JSON.parse(localStorage.getItem("headrace-settings")) ?? {};
  } catch {
    return {};
  }
}

function save(changes) {
  Object.assign(settings, changes);
  localStorage.setItem("headrace-settings", JSON.stringify(settings));
}

/** A text area whose text is a setting; `json()` is its value, undefined where it is empty. */
function area(label, name, placeholder) {
  const field = h("textarea", { value: settings[name] ?? "", placeholder, rows: 3, onchange: () => save({ [name]: field.value }) });
  const json = () => {
    field.setCustomValidity("");
    if (field.value.trim() === "") return undefined;
    try {
      return JSON.parse(field.value);
    } catch (error) {
      field.setCustomValidity(`not JSON: ${error.message}`);
      field.reportValidity();
      throw new ApiError(400, `${label}: ${error.message}`, name);
    }
  };
  return { label: h("label", { class: "block" }, label, field), field, json };
}

async function start() {
  talks = await store.all();
  if (talks.length) talk = talks[0];
  draw();
  await connect();
  setInterval(watch, 2000);
}

async function connect() {
  try {
    const [cards, openapi] = await Promise.all(["v1/models", "openapi.json"].map(async (path) => (await call(path)).json()));
    models = cards.data;
    model.replaceChildren(...models.map((card) => h("option", { value: card.id, selected: card.id === settings.model }, card.id)));
    declared = parameters(openapi);
    describe();
    input.focus();
  } catch (error) {
    if (error.status === 401) return askKey();
    status.textContent = error.status === 503 ? `not ready: ${error.message}` : `no connection: ${error.message}`;
    setTimeout(connect, 1000 * Math.min(Number(error.retryAfter) || 2, 10));
  }
}

/** Shows the limits and the defaults of the chosen model. */
function describe() {
  const card = models.find((each) => each.id === model.value) ?? models[0];
  sampling.replaceChildren(...panel(declared, card.default_sampling_params ?? {}, { ...settings.sampling }, (values) => save({ sampling: values })));
  status.textContent = `${card.max_model_len.toLocaleString()} tokens of context`;
}

function askKey() {
  const key = h("input", { type: "password", autocomplete: "off", required: true, "aria-label": "API key" });
  const remember = h("input", { type: "checkbox", id: "remember" });
  const dialog = h("dialog", { "aria-label": "API key" }, h("form", { method: "dialog", onsubmit: () => {
    setKey(key.value, remember.checked);
    dialog.remove();
    connect();
  } }, h("p", {}, "This server needs an API key."), key, h("p", {}, remember, h("label", { for: "remember" }, " keep it for this tab")), h("button", { class: "main" }, "Continue")));
  document.body.append(dialog);
  dialog.showModal();
}

function begin() {
  running?.abort();
  talk = store.conversation();
  draw();
  input.focus();
}

/** Draws the list of conversations and the chosen branch. */
function draw() {
  list.replaceChildren(...talks.map((each) => h("li", {},
    button(each.title, () => { running?.abort(); talk = each; draw(); }, { "aria-current": String(each === talk) }),
    button("✕", () => remove(each), { "aria-label": `delete ${each.title}` }))));
  const path = store.branch(talk);
  const answered = new Set(path.map((id) => talk.nodes[id].callId).filter(Boolean));
  log.replaceChildren(...path.map((id) => view(id, answered)));
  log.scrollTop = log.scrollHeight;
}

function view(id, answered) {
  const node = talk.nodes[id];
  const ids = store.children(talk, node.parent);
  const choose = (at) => { talk.chosen[node.parent] = ids[at]; kept(); draw(); };
  const actions = {
    edit: () => edit(id),
    regenerate: () => generate(node.parent),
    toggle: () => { node.showTokens = !node.showTokens; draw(); },
    result: (callId, content) => answer(store.add(talk, id, { role: "tool", callId, content })),
  };
  return messageView(node, { ids, at: ids.indexOf(id), choose }, actions, answered);
}

/** Goes on once every call of the reply has its result. */
function answer(id) {
  kept();
  const path = store.branch(talk).map((each) => talk.nodes[each]);
  const open = (path.findLast((node) => node.calls?.length)?.calls ?? []).filter((call) => !path.some((node) => node.callId === call.id));
  if (open.length) draw();
  else generate(id);
}

function edit(id) {
  editing = talk.nodes[id].parent;
  const { content } = talk.nodes[id];
  pictures = Array.isArray(content) ? content.filter((part) => part.type !== "text") : [];
  input.value = Array.isArray(content) ? content.filter((part) => part.type === "text").map((part) => part.text).join("\n") : content;
  drawShots();
  input.focus();
}

function remove(each) {
  talks = talks.filter((other) => other !== each);
  store.forget(each.id);
  if (each === talk) talk = talks[0] ?? store.conversation();
  draw();
}

function kept() {
  talk.changed = Date.now();
  if (!talks.includes(talk)) talks.unshift(talk);
  store.keep(talk);
}

function onKey(event) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  else if (event.key === "Escape") running?.abort();
}

function submit(event) {
  event.preventDefault();
  if (running) return running.abort();
  const text = input.value.trim();
  if (!text && !pictures.length) return;
  const path = store.branch(talk);
  const parent = editing ?? path.at(-1) ?? 0;
  const content = pictures.length ? [...pictures, { type: "text", text }] : text;
  if (parent === 0 && editing === null) talk.title = text.slice(0, 60) || "Pictures";
  const id = store.add(talk, parent, { role: "user", content });
  editing = null;
  pictures = [];
  input.value = "";
  drawShots();
  kept();
  generate(id);
}

/** The request's body for a reply to a message. */
function body(parent) {
  const path = [];
  for (let at = parent; at > 0; at = talk.nodes[at].parent) path.unshift(store.wire(talk.nodes[at]));
  const found = { ...settings.sampling, model: model.value, messages: path, stream_options: { include_usage: true } };
  if (system.field.value.trim()) found.messages.unshift({ role: "system", content: system.field.value });
  const form = schema.json(), given = tools.json();
  if (form !== undefined) found.response_format = { type: "json_schema", json_schema: { name: "answer", schema: form } };
  if (given !== undefined) found.tools = given;
  if (logprobs.checked) Object.assign(found, { logprobs: true, top_logprobs: 5 });
  return found;
}

async function generate(parent) {
  running?.abort();
  const mine = (running = new AbortController());
  const owner = talk;
  const node = owner.nodes[store.add(owner, parent, { role: "assistant", content: "", model: model.value })];
  const began = performance.now();
  const seconds = () => (performance.now() - began) / 1000;
  send.textContent = "Stop";
  try {
    const request = body(parent);
    draw();
    const shown = log.lastElementChild.querySelector(".content");
    shown.classList.add("busy");
    const growing = new Growing(shown);
    const thought = h("div", { class: "plain" });
    for await (const event of stream(request, mine.signal)) {
      node.usage = event.usage ?? node.usage;
      const [choice] = event.choices;
      if (!choice) continue;
      const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
      const { delta } = choice;
      const reasoning = delta.reasoning_content ?? delta.reasoning;
      if (reasoning) {
        if (!node.reasoning) shown.before(h("details", { open: true }, h("summary", {}, "reasoning"), thought));
        node.reasoning = (node.reasoning ?? "") + reasoning;
        thought.append(reasoning);
      }
      if (delta.content) {
        if (node.reasoning) node.reasoningSeconds ??= seconds();
        node.content += delta.content;
        growing.write(delta.content);
      }
      for (const piece of delta.tool_calls ?? []) addCall(node, piece);
      if (choice.logprobs?.content) (node.tokens ??= []).push(...choice.logprobs.content);
      if (reasoning || delta.content || delta.tool_calls) node.first ??= seconds();
      if (choice.finish_reason === "length") node.stopped = "stopped at the limit of tokens";
      if (atEnd) log.scrollTop = log.scrollHeight;
    }
  } catch (error) {
    if (mine.signal.aborted) node.stopped = "stopped";
    else node.error = error.param ? `${error.param}: ${error.message}` : error.message;
    if (error.status === 401) askKey();
  }
  node.seconds = seconds();
  node.first ??= node.seconds;
  if (running === mine) {
    running = null;
    send.textContent = "Send";
  }
  owner.changed = Date.now();
  if (!talks.includes(owner)) talks.unshift(owner);
  store.keep(owner);
  if (talk === owner) draw();
}

function addCall(node, piece) {
  const calls = (node.calls ??= []);
  const call = (calls[piece.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
  if (piece.id) call.id = piece.id;
  if (piece.function?.name) call.function.name = piece.function.name;
  call.function.arguments += piece.function?.arguments ?? "";
}

function dragged(event, inside) {
  event.preventDefault();
  composer.classList.toggle("drop", inside);
}

function ondrop(event) {
  dragged(event, false);
  takeFiles(event.dataTransfer.files);
}

async function takeFiles(given, event) {
  const media = [...given].filter((file) => /^(image|video)\//.test(file.type));
  if (media.length) event?.preventDefault();
  for (const file of media) {
    if (file.type.startsWith("image/")) pictures.push({ type: "image_url", image_url: { url: await smaller(file) } });
    else pictures.push({ type: "video_url", video_url: { url: await dataUrl(file) } });
  }
  drawShots();
}

function drawShots() {
  shots.replaceChildren(...pictures.map((part, at) => h("figure", {},
    part.type === "image_url" ? h("img", { src: part.image_url.url, alt: "attached picture" }) : h("p", {}, "video"),
    button("Remove", () => { pictures.splice(at, 1); drawShots(); }))));
}

/** The picture as a data URL, at most LARGEST_SIDE wide and high. */
async function smaller(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, LARGEST_SIDE / Math.max(bitmap.width, bitmap.height));
  if (scale === 1) return dataUrl(file);
  const canvas = h("canvas", { width: Math.round(bitmap.width * scale), height: Math.round(bitmap.height * scale) });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL(file.type === "image/png" ? "image/png" : "image/jpeg", 0.9);
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

const history = new Map();
let last = null;

/** Reads the metrics while their tiles are to be seen. */
async function watch() {
  if (document.hidden || !tiles.checkVisibility()) return;
  try {
    const now = await metrics();
    const since = (name) => (last ? now.get(name) - last.values.get(name) : 0);
    const passed = last ? (performance.now() - last.at) / 1000 : 1;
    const mean = (name) => {
      const count = since(`headrace_${name}_count`);
      return count ? `${((1000 * since(`headrace_${name}_sum`)) / count).toFixed(1)} ms` : "–";
    };
    const queried = now.get("headrace_prefix_cache_query_tokens_total");
    const rate = since("headrace_generation_tokens_total") / passed;
    const shown = [
      ["running", now.get("headrace_requests_running")], ["waiting", now.get("headrace_requests_waiting")],
      ["tokens a second", rate], ["KV cache %", 100 * now.get("headrace_kv_cache_usage_ratio")],
      ["prefix hits %", queried ? (100 * now.get("headrace_prefix_cache_hit_tokens_total")) / queried : 0],
    ];
    const texts = [["first token", mean("time_to_first_token_seconds")], ["between tokens", mean("inter_token_latency_seconds")]];
    tiles.replaceChildren(...shown.map(([name, value]) => {
      const values = [...(history.get(name) ?? []), value].slice(-60);
      history.set(name, values);
      return h("div", {}, name, h("b", {}, Number.isInteger(value) ? String(value) : value.toFixed(1)), sparkline(values));
    }), ...texts.map(([name, value]) => h("div", {}, name, h("b", {}, value))));
    last = { values: now, at: performance.now() };
  } catch { /* The status line says what is wrong. */ }
}

start();
