// A subset of Markdown as a tree of nodes: headings, lists, tables, quotes, fences, emphasis, code and links.
import { h } from "./dom.js";

const DEEPEST = 16;
const LONGEST_LINE = 20000; // a longer one is shown as it is: looking for closing marks in it takes too long
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)/;
const SEPARATOR = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

/** The text as nodes. */
export function markdown(text) {
  return blocks(text.split("\n"), 0);
}

/** Number of characters of `text` up to the last empty line outside of fences: what is before it changes no more. */
export function finished(text) {
  let fence = null, end = 0, at = 0;
  for (const line of text.split("\n")) {
    const mark = line.match(FENCE);
    if (mark && (fence === null || line.trim().startsWith(fence))) fence = fence === null ? mark[1] : null;
    at += line.length + 1;
    if (fence === null && line === "") end = at;
  }
  return Math.min(end, text.length);
}

function blocks(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const fence = line.match(FENCE);
    if (line.trim() === "") at += 1;
    else if (fence) {
      let end = at + 1;
      while (end < lines.length && !lines[end].trim().startsWith(fence[1])) end += 1;
      found.push(code(lines.slice(at + 1, end).join("\n"), fence[2]));
      at = end + 1;
    } else if (/^ {0,3}#{1,6}\s/.test(line)) {
      const level = line.trim().match(/^#+/)[0].length;
      found.push(h(`h${Math.min(6, level + 2)}`, {}, inline(line.trim().slice(level).trim())));
      at += 1;
    } else if (RULE.test(line)) {
      found.push(h("hr"));
      at += 1;
    } else if (/^ {0,3}>/.test(line)) {
      let end = at;
      while (end < lines.length && /^ {0,3}>/.test(lines[end])) end += 1;
      const inner = lines.slice(at, end).map((each) => each.replace(/^ {0,3}> ?/, ""));
      found.push(h("blockquote", {}, nested(inner, depth)));
      at = end;
    } else if (ITEM.test(line)) {
      const [list, end] = listOf(lines, at, depth);
      found.push(list);
      at = end;
    } else if (line.includes("|") && SEPARATOR.test(lines[at + 1] ?? "")) {
      let end = at + 2;
      while (end < lines.length && lines[end].includes("|")) end += 1;
      found.push(table(lines[at], lines.slice(at + 2, end)));
      at = end;
    } else {
      let end = at + 1;
      while (end < lines.length && lines[end].trim() !== "" && !starts(lines[end])) end += 1;
      found.push(h("p", {}, lines.slice(at, end).flatMap((each, nth) => (nth ? [h("br"), ...inline(each)] : inline(each)))));
      at = end;
    }
  }
  return found;
}

function nested(lines, depth) {
  return depth >= DEEPEST ? [h("p", { class: "plain" }, lines.join("\n"))] : blocks(lines, depth + 1);
}

function starts(line) {
  return FENCE.test(line) || ITEM.test(line) || /^ {0,3}(>|#{1,6}\s)/.test(line);
}

function code(text, language) {
  const copy = h("button", { type: "button", onclick: () => navigator.clipboard?.writeText(text) }, "Copy code");
  return h("pre", { tabIndex: 0, "aria-label": language ? `code in ${language}` : "code" }, h("code", {}, text), h("div", {}, copy));
}

function listOf(lines, from, depth) {
  const [, indent, mark] = lines[from].match(ITEM);
  const ordered = /\d/.test(mark);
  const list = h(ordered ? "ol" : "ul", ordered ? { start: parseInt(mark, 10) } : {});
  let at = from;
  while (at < lines.length) {
    const item = lines[at].match(ITEM);
    if (!item || item[1].length < indent.length || /\d/.test(item[2]) !== ordered) break;
    const width = item[1].length + item[2].length + 1;
    const inner = [item[3]];
    at += 1;
    while (at < lines.length) {
      const line = lines[at];
      const deeper = line.search(/\S/) >= Math.min(width, item[1].length + 2);
      if (line.trim() === "" ? !/^\s+\S/.test(lines[at + 1] ?? "") : !deeper && (ITEM.test(line) || starts(line))) break;
      inner.push(deeper ? line.slice(Math.min(width, line.search(/\S/))) : line.trim());
      at += 1;
    }
    const content = inner.length === 1 ? inline(inner[0]) : nested(inner, depth);
    list.append(h("li", {}, content));
    while (at < lines.length && lines[at].trim() === "" && ITEM.test(lines[at + 1] ?? "")) at += 1;
  }
  return [list, at];
}

function table(head, rows) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const columns = cells(head).map((cell) => h("th", { scope: "col" }, inline(cell)));
  const body = rows.map((row) => h("tr", {}, cells(row).map((cell) => h("td", {}, inline(cell)))));
  return h("table", {}, h("thead", {}, h("tr", {}, columns)), h("tbody", {}, body));
}

/** Emphasis, code and links of one line. Each mark is looked for once, so that the time grows with the length alone. */
function inline(text, depth = 0) {
  if (text.length > LONGEST_LINE || depth > 6) return [text];
  const found = [];
  let plain = "", at = 0;
  const absent = new Set();
  const closing = (mark, from) => {
    if (absent.has(mark)) return -1;
    const end = text.indexOf(mark, from);
    if (end < 0) absent.add(mark);
    return end;
  };
  const push = (node, next) => {
    if (plain) found.push(plain);
    plain = "";
    found.push(node);
    at = next;
  };
  while (at < text.length) {
    const character = text[at];
    if (character === "\\" && /[\\`*_[\]()#+.!|~>-]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
      continue;
    }
    if (character === "`") {
      const mark = text.slice(at).match(/^`+/)[0];
      const end = closing(mark, at + mark.length);
      if (end > 0) {
        push(h("code", {}, text.slice(at + mark.length, end)), end + mark.length);
        continue;
      }
    }
    const mark = ["**", "__", "~~", "*", "_"].find((each) => text.startsWith(each, at));
    if (mark && opens(text, at, mark)) {
      const end = closing(mark, at + mark.length + 1);
      if (end > 0 && closes(text, end, mark)) {
        const tag = mark === "~~" ? "s" : mark.length === 2 ? "strong" : "em";
        push(h(tag, {}, inline(text.slice(at + mark.length, end), depth + 1)), end + mark.length);
        continue;
      }
    }
    const link = character === "[" && text.slice(at, at + 2048).match(/^\[([^\][]*)\]\(([^()\s]*)\)/);
    if (link && text[at - 1] !== "!" && /^(https?:\/\/|mailto:)/i.test(link[2])) {
      const props = { href: link[2], title: link[2], target: "_blank", rel: "noopener noreferrer" };
      push(h("a", props, link[1], h("span", { class: "dim" }, ` (${link[2]})`)), at + link[0].length);
      continue;
    }
    plain += character;
    at += 1;
  }
  if (plain) found.push(plain);
  return found;
}

function opens(text, at, mark) {
  const before = text[at - 1] ?? " ", after = text[at + mark.length] ?? " ";
  return !/\s/.test(after) && (mark[0] !== "_" || !/\w/.test(before));
}

function closes(text, at, mark) {
  return !/\s/.test(text[at - 1]) && (mark[0] !== "_" || !/\w/.test(text[at + mark.length] ?? " "));
}
