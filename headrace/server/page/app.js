// The page: conversations at the left, the chat, and settings at the right.
import { ApiError, call, setKey, stream } from "./api.js";
import { attentionView } from "./attention.js";
import { button, h } from "./dom.js";
import { explainView } from "./explain.js";
import { Attachments } from "./media.js";
import { messageView } from "./message.js";
import { Reply } from "./reply.js";
import { panel, parameters } from "./settings.js";
import * as store from "./store.js";
import { watch } from "./tiles.js";

const settings = load();
let talks = [], talk = store.conversation(), models = [], declared = [], running = null, editing = null;

const list = h("ul", {});
const log = h("div", { class: "log", role: "log", "aria-label": "conversation", tabIndex: 0 });
const input = h("textarea", { "aria-label": "Message", placeholder: "Message", rows: 2, onkeydown: onKey, onpaste: (event) => attached.take(event.clipboardData.files, event) });
const files = h("input", { type: "file", accept: "image/*,video/*", multiple: true, class: "visually-hidden", tabIndex: -1, "aria-hidden": "true", onchange: () => attached.take(files.files) });
const attached = new Attachments();
const send = button("Send", submit, { class: "main" });
const model = h("select", { "aria-label": "Model", onchange: () => { save({ model: model.value }); describe(); } });
const status = h("span", { class: "dim", role: "status" });
const sampling = h("div"), tiles = h("div", { class: "tiles" });
const system = area("System message", "system", "You are a helpful assistant.");
const schema = area("JSON Schema of the answers", "schema", '{"type": "object", "properties": {}}', checkSchema);
const fault = h("p", { class: "error", role: "alert" });
const tools = area("Tools, as a JSON list", "tools", '[{"type": "function", "function": {"name": "…", "parameters": {}}}]');
const logprobs = h("input", { type: "checkbox", id: "logprobs", checked: !!settings.logprobs, onchange: () => save({ logprobs: logprobs.checked }) });
const beside = h("input", { type: "number", id: "beside", min: 1, max: 8, placeholder: "1", value: settings.n ?? "", onchange: () => beside.reportValidity() && save({ n: Number(beside.value) || 1 }) });
const kept = h("input", { type: "file", accept: "application/json", class: "visually-hidden", tabIndex: -1, "aria-hidden": "true", onchange: () => read(kept.files[0]) });

const composer = h("form", { class: "composer", onsubmit: submit, ondragover: (event) => dragged(event, true), ondragleave: (event) => dragged(event, false), ondrop },
  attached.element, h("div", { class: "row" }, input, button("Add picture", () => files.click()), files, send));
const wide = matchMedia("(min-width: 60rem)");
const app = h("div", { class: `app${wide.matches && settings.side !== false ? " side" : ""}` },
  h("header", {}, h("h1", {}, "headrace"), model, status, h("span", { class: "space" }),
    button("Conversations", () => toggle("list", "side")), button("Settings", () => save({ side: toggle("side", "list") })),
    h("a", { href: "docs" }, "API")),
  h("nav", { "aria-label": "Conversations" }, button("New conversation", begin), list, h("div", { class: "row" }, button("Export", write), button("Import", () => kept.click()), kept)),
  h("main", {}, log, composer),
  h("aside", { "aria-label": "Settings" }, h("h2", {}, "Instructions"), system.label, h("h2", {}, "Sampling"), sampling,
    h("label", { class: "field", for: "logprobs" }, "token probabilities", logprobs),
    h("label", { class: "field", for: "beside" }, "answers side by side", beside),
    h("h2", {}, "Form of the answer"), schema.label, fault, h("h2", {}, "Tools"), tools.label, h("h2", {}, "Server"), tiles));
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
function area(label, name, placeholder, changed = () => {}) {
  const field = h("textarea", { value: settings[name] ?? "", placeholder, rows: 3, onchange: () => { save({ [name]: field.value }); changed(); } });
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
  setInterval(() => watch(tiles), 2000);
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
  const views = path.map((id) => view(id, answered));
  const together = store.together(talk, path.at(-1));
  if (together.length) views.splice(-1, 1, h("div", { class: "beside" }, together.map((id) => view(id, answered, path.at(-1)))));
  log.replaceChildren(...views);
  log.scrollTop = log.scrollHeight;
}

/** Asks the server whether the schema can hold an answer; the message names the place in it. */
async function checkSchema() {
  fault.textContent = "";
  try {
    const form = schema.json();
    if (form === undefined) return;
    const request = { model: model.value, messages: [{ role: "user", content: "" }], response_format: formOf(form) };
    await call("v1/chat/completions/render", { method: "POST", body: JSON.stringify(request) });
  } catch (error) {
    // A schema that can be served is refused by name: its constraint cannot be rendered.
    if (error.param?.startsWith("response_format") || error.param === "schema") fault.textContent = error.message;
  }
}

const formOf = (form) => ({ type: "json_schema", json_schema: { name: "answer", schema: form } });

/** @param picked of replies side by side, the one that the conversation goes on with. */
function view(id, answered, picked) {
  const node = talk.nodes[id];
  const ids = picked === undefined ? store.children(talk, node.parent) : [];
  const choose = (at) => { talk.chosen[node.parent] = ids[at]; keep(); draw(); };
  const actions = {
    edit: () => edit(id),
    regenerate: () => generate(node.parent),
    toggle: () => { node.showTokens = !node.showTokens; draw(); },
    result: (callId, content) => answer(store.add(talk, id, { role: "tool", callId, content })),
    explain: () => explainView(node.answerId, node.model),
    attention: () => attentionView({ model: node.model, messages: messages(id) }),
    ...(picked === undefined ? {} : { picked: picked === id, pick: () => { talk.chosen[node.parent] = id; keep(); draw(); } }),
  };
  return messageView(node, id, { ids, at: ids.indexOf(id), choose }, actions, answered);
}

/** Goes on once every call of the reply has its result. */
function answer(id) {
  keep();
  const path = store.branch(talk).map((each) => talk.nodes[each]);
  const open = (path.findLast((node) => node.calls?.length)?.calls ?? []).filter((call) => !path.some((node) => node.callId === call.id));
  if (open.length) draw();
  else generate(id);
}

function edit(id) {
  editing = talk.nodes[id].parent;
  const { content } = talk.nodes[id];
  attached.set(Array.isArray(content) ? content.filter((part) => part.type !== "text") : []);
  input.value = Array.isArray(content) ? content.filter((part) => part.type === "text").map((part) => part.text).join("\n") : content;
  input.focus();
}

function remove(each) {
  talks = talks.filter((other) => other !== each);
  store.forget(each.id);
  if (each === talk) talk = talks[0] ?? store.conversation();
  draw();
}

function keep(owner = talk) {
  owner.changed = Date.now();
  if (!talks.includes(owner)) talks.unshift(owner);
  store.keep(owner);
}

/** Saves all conversations as a file. */
function write() {
  const url = URL.createObjectURL(new Blob([JSON.stringify(store.exported(talks))], { type: "application/json" }));
  h("a", { href: url, download: "headrace-conversations.json" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** Adds the conversations of a file that `write` made. */
async function read(file) {
  kept.value = "";
  try {
    const found = store.imported(JSON.parse(await file.text()));
    found.forEach((each) => store.keep(each));
    talks = [...found, ...talks];
    talk = talks[0] ?? talk;
    draw();
  } catch (error) {
    status.textContent = `${file.name} cannot be read: ${error.message}`;
  }
}

function onKey(event) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  else if (event.key === "Escape") running?.abort();
}

function submit(event) {
  event.preventDefault();
  if (running) return running.abort();
  const text = input.value.trim();
  const media = attached.parts;
  if (!text && !media.length) return;
  const path = store.branch(talk);
  const parent = editing ?? path.at(-1) ?? 0;
  const content = media.length ? [...media, { type: "text", text }] : text;
  if (parent === 0 && editing === null) talk.title = text.slice(0, 60) || "Pictures";
  const id = store.add(talk, parent, { role: "user", content });
  editing = null;
  attached.set([]);
  input.value = "";
  keep();
  generate(id);
}

/** Messages up to one of them, as the API takes them. */
function messages(last) {
  const path = [];
  for (let at = last; at > 0; at = talk.nodes[at].parent) path.unshift(store.wire(talk.nodes[at]));
  return system.field.value.trim() ? [{ role: "system", content: system.field.value }, ...path] : path;
}

/** The request's body for replies to a message. */
function body(parent, count) {
  const found = { ...settings.sampling, model: model.value, messages: messages(parent), stream_options: { include_usage: true } };
  const form = schema.json(), given = tools.json();
  if (form !== undefined) found.response_format = formOf(form);
  if (given !== undefined) found.tools = given;
  if (logprobs.checked) Object.assign(found, { logprobs: true, top_logprobs: 5 });
  if (count > 1) found.n = count;
  return found;
}

async function generate(parent) {
  running?.abort();
  const mine = (running = new AbortController());
  const owner = talk, count = settings.n ?? 1;
  const group = count > 1 ? { group: owner.nodes.length } : {};
  const ids = Array.from({ length: count }, () => store.add(owner, parent, { role: "assistant", content: "", model: model.value, ...group }));
  owner.chosen[parent] = ids[0];
  const nodes = ids.map((id) => owner.nodes[id]);
  let replies = [];
  send.textContent = "Stop";
  try {
    const request = body(parent, count);
    draw();
    replies = nodes.map((node, at) => new Reply(node, log.querySelector(`[data-id="${ids[at]}"]`)));
    for await (const event of stream(request, mine.signal)) {
      const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
      nodes[0].usage = event.usage ?? nodes[0].usage;
      for (const node of nodes) node.answerId ??= event.id;
      for (const choice of event.choices) replies[choice.index].take(choice);
      if (atEnd) log.scrollTop = log.scrollHeight;
    }
  } catch (error) {
    for (const node of nodes) {
      if (mine.signal.aborted) node.stopped = "stopped";
      else node.error = error.param ? `${error.param}: ${error.message}` : error.message;
    }
    if (error.status === 401) askKey();
  }
  replies.forEach((reply) => reply.end());
  if (running === mine) {
    running = null;
    send.textContent = "Send";
  }
  keep(owner);
  if (talk === owner) draw();
}

function dragged(event, inside) {
  event.preventDefault();
  composer.classList.toggle("drop", inside);
}

function ondrop(event) {
  dragged(event, false);
  attached.take(event.dataTransfer.files);
}

start();
