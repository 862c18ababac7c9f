// A reply while it is streamed: its node of the conversation, and what is drawn of it.
import { h } from "./dom.js";
import { Growing } from "./message.js";

export class Reply {
  /** @param article the message's element, into which the reply is drawn. */
  constructor(node, article) {
    this.node = node;
    this.shown = article.querySelector(".content");
    this.shown.classList.add("busy");
    this.growing = new Growing(this.shown);
    this.thought = h("div", { class: "plain" });
    this.began = performance.now();
  }

  get seconds() {
    return (performance.now() - this.began) / 1000;
  }

  /** Adds one choice of a chunk. */
  take({ delta, finish_reason: reason, logprobs }) {
    const { node } = this;
    const reasoning = delta.reasoning_content ?? delta.reasoning;
    if (reasoning) {
      if (!node.reasoning) this.shown.before(h("details", { open: true }, h("summary", {}, "reasoning"), this.thought));
      node.reasoning = (node.reasoning ?? "") + reasoning;
      this.thought.append(reasoning);
    }
    if (delta.content) {
      if (node.reasoning) node.reasoningSeconds ??= this.seconds;
      node.content += delta.content;
      this.growing.write(delta.content);
    }
    for (const piece of delta.tool_calls ?? []) addCall(node, piece);
    if (logprobs?.content) (node.tokens ??= []).push(...logprobs.content);
    if (reasoning || delta.content || delta.tool_calls) node.first ??= this.seconds;
    if (reason === "length") node.stopped = "stopped at the limit of tokens";
  }

  end() {
    this.node.seconds = this.seconds;
    this.node.first ??= this.node.seconds;
  }
}

function addCall(node, piece) {
  const calls = (node.calls ??= []);
  const call = (calls[piece.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
  if (piece.id) call.id = piece.id;
  if (piece.function?.name) call.function.name = piece.function.name;
  call.function.arguments += piece.function?.arguments ?? "";
}
