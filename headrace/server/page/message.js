// One message of a conversation on the page.
import { button, h } from "./dom.js";
import { finished, markdown } from "./markdown.js";

const CLASSES = [0.05, 0.2, 0.4, 0.6, 0.8]; // probabilities up to which a token has the colour p0, p1, ...

/** A reply that grows: finished blocks stay as they are, and the block under way is drawn again once a frame. */
export class Growing {
  constructor(target) {
    this.target = target;
    this.tail = h("div");
    target.append(this.tail);
    this.text = "";
    this.done = 0;
    this.frame = 0;
  }

  write(piece) {
    this.text += piece;
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = 0;
    const rest = this.text.slice(this.done);
    const end = finished(rest);
    if (end > 0) {
      this.tail.before(...markdown(rest.slice(0, end)));
      this.done += end;
    }
    this.tail.replaceChildren(...markdown(this.text.slice(this.done)));
  }
}

/** The text of a message's content. */
export function textOf(content) {
  return typeof content === "string" ? content : (content ?? []).filter((part) => part.type === "text").map((part) => part.text).join("\n");
}

function media(content) {
  return (Array.isArray(content) ? content : []).map((part) => {
    if (part.type === "image_url") return h("img", { src: part.image_url.url, alt: "picture of the message" });
    if (part.type === "video_url") return h("p", { class: "dim" }, "a video");
    return null;
  });
}

/** A listener by which arrow keys move the focus along elements. */
export function roving(elements) {
  return (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const next = elements[elements.indexOf(document.activeElement) + step];
    if (next) {
      event.preventDefault();
      next.focus();
    }
  };
}

/** Tokens with colours by their probabilities. Arrow keys move from token to token; the line below names the alternatives. */
function tokenView(tokens) {
  const line = h("div", { class: "alternatives", role: "status" }, "Point at a token, or move with the arrow keys.");
  const spans = tokens.map((token, at) => {
    const probability = Math.exp(token.logprob);
    const nth = CLASSES.findIndex((most) => probability <= most);
    const show = () => {
      const others = token.top_logprobs.map((other) => `${JSON.stringify(other.token)} ${(100 * Math.exp(other.logprob)).toFixed(1)} %`);
      line.textContent = `${JSON.stringify(token.token)} ${(100 * probability).toFixed(1)} %   of ${others.join("   ")}`;
    };
    return h("span", { class: `p${nth < 0 ? 5 : nth}`, tabIndex: at ? -1 : 0, onmouseenter: show, onfocus: show }, token.token);
  });
  return h("div", {}, h("p", { class: "tokens", role: "group", "aria-label": "tokens by probability", onkeydown: roving(spans) }, spans), line);
}

/** A tool call, whose result the user can type in. */
function callCard(call, answered, onresult) {
  const result = h("textarea", { "aria-label": `result of ${call.function.name}`, placeholder: "Result of the call" });
  const send = button("Send result", () => onresult(call.id, result.value));
  return h("details", { open: !answered },
    h("summary", {}, `calls ${call.function.name}`),
    h("pre", { tabIndex: 0, "aria-label": "arguments" }, pretty(call.function.arguments)),
    answered ? null : [result, send]);
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function stats({ usage, seconds, first }) {
  if (!usage) return null;
  const rate = usage.completion_tokens > 1 && seconds > first ? `, ${((usage.completion_tokens - 1) / (seconds - first)).toFixed(1)} a second` : "";
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  return h("span", {}, `${usage.prompt_tokens} + ${usage.completion_tokens} tokens${rate}, first after ${first.toFixed(2)} s${cached ? `, ${cached} cached` : ""}`);
}

/**
 * The element of a message.
 * @param id the number of the node.
 * @param siblings {ids, at, choose}: branches that begin here.
 * @param actions {edit, regenerate, toggle, result, explain, attention}, and of replies side by side {picked, pick}.
 */
export function messageView(node, id, siblings, actions, answered) {
  const content = h("div", { class: "content" });
  if (node.role === "user" || node.role === "tool") content.append(...media(node.content).filter(Boolean), h("div", { class: "plain" }, textOf(node.content)));
  else if (node.showTokens && node.tokens?.length) content.append(tokenView(node.tokens));
  else content.append(...markdown(textOf(node.content)));
  const reasoning = node.reasoning ? h("details", {}, h("summary", {}, reasoned(node)), h("div", { class: "plain" }, node.reasoning)) : null;
  const calls = (node.calls ?? []).map((call) => callCard(call, answered.has(call.id), actions.result));
  const branches = siblings.ids.length < 2 ? null : [
    button("‹", () => siblings.choose(siblings.at - 1), { "aria-label": "previous branch", disabled: siblings.at === 0 }),
    `${siblings.at + 1} of ${siblings.ids.length}`,
    button("›", () => siblings.choose(siblings.at + 1), { "aria-label": "next branch", disabled: siblings.at === siblings.ids.length - 1 }),
  ];
  const who = { user: "You", assistant: "Model", tool: "Result of a tool" }[node.role];
  const view = h("div");
  const open = (name, make) => {
    if (view.dataset.name === name) delete view.dataset.name;
    else view.dataset.name = name;
    view.replaceChildren(...(view.dataset.name ? [make()] : []));
  };
  return h("article", { class: node.role, "aria-label": who, "data-id": String(id) },
    h("header", {}, who, node.model ? h("span", {}, node.model) : null),
    reasoning, content, calls,
    node.error ? h("p", { class: "error", role: "alert" }, node.error) : null,
    h("footer", {}, branches,
      node.role === "user" ? button("Edit", actions.edit) : null,
      node.role === "assistant" ? [button("Regenerate", actions.regenerate), button("Copy", () => navigator.clipboard?.writeText(textOf(node.content)))] : null,
      node.answerId ? button("Explain", () => open("explain", actions.explain)) : null,
      node.role === "assistant" && node.content && !node.calls?.length ? button("Attention", () => open("attention", actions.attention)) : null,
      actions.pick && node.seconds !== undefined ? button(actions.picked ? "Chosen" : "Choose", actions.pick, { "aria-pressed": String(actions.picked) }) : null,
      node.tokens?.length ? button(node.showTokens ? "Show text" : "Show tokens", actions.toggle) : null,
      node.stopped ? h("span", {}, node.stopped) : null, stats(node)), view);
}

function reasoned(node) {
  return node.reasoningSeconds ? `reasoned for ${node.reasoningSeconds.toFixed(1)} s` : "reasoning";
}
