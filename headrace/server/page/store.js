// Conversations in the browser's database: trees of messages, in which each edit or new reply is a branch.

/** A new conversation. Node 0 is the root; `chosen` is the selected child of each node. */
export function conversation() {
  return { id: crypto.randomUUID?.() ?? String(Math.random()).slice(2), title: "New conversation", changed: Date.now(), nodes: [{ parent: -1 }], chosen: {} };
}

export function children(talk, parent) {
  return talk.nodes.map((_, id) => id).filter((id) => talk.nodes[id].parent === parent);
}

/** Ids of the messages from the first to the last of the chosen branch. */
export function branch(talk) {
  const path = [];
  for (let at = talk.chosen[0]; at !== undefined; at = talk.chosen[at]) path.push(at);
  return path;
}

/** Adds a message behind another, as the chosen one. */
export function add(talk, parent, message) {
  talk.nodes.push({ parent, ...message });
  const id = talk.nodes.length - 1;
  talk.chosen[parent] = id;
  return id;
}

/** Replies that were generated together with the last of the branch, if there are several. */
export function together(talk, id) {
  const { group, parent } = talk.nodes[id] ?? {};
  return group === undefined ? [] : children(talk, parent).filter((other) => talk.nodes[other].group === group);
}

const FORMAT = "headrace-conversations-1";
const ROLES = new Set(["user", "assistant", "tool"]);

/** Conversations as the content of a file. */
export function exported(talks) {
  return { format: FORMAT, conversations: talks };
}

/** The conversations of a file, under new names. Throws Error where it has another form. */
export function imported(file) {
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) throw new Error("it is no export of conversations");
  return file.conversations.map(({ title, changed, nodes, chosen }) => {
    const whole = Array.isArray(nodes) && nodes.every(({ parent, role }, id) => (id ? ROLES.has(role) && parent >= 0 && parent < id : parent === -1));
    const follows = (id, child) => nodes[child]?.parent === Number(id);
    if (!whole || !nodes.length || !Object.entries(chosen ?? {}).every(([id, child]) => follows(id, child))) throw new Error("a conversation in it is broken");
    return { ...conversation(), title: String(title), changed: Number(changed) || Date.now(), nodes, chosen: { ...chosen } };
  });
}

/** The message as the API takes it. */
export function wire(node) {
  const message = { role: node.role, content: node.content };
  if (node.calls?.length) message.tool_calls = node.calls;
  if (node.reasoning) message.reasoning_content = node.reasoning;
  if (node.role === "tool") message.tool_call_id = node.callId;
  return message;
}

function database() {
  return new Promise((resolve, reject) => {
    const opening = indexedDB.open("headrace", 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore("conversations", { keyPath: "id" });
    opening.onsuccess = () => resolve(opening.result);
    opening.onerror = () => reject(opening.error);
  });
}

async function transact(mode, work) {
  const opened = await database();
  try {
    return await new Promise((resolve, reject) => {
      const request = work(opened.transaction("conversations", mode).objectStore("conversations"));
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => reject(request.error);
    });
  } finally {
    opened.close();
  }
}

/** Kept conversations, the latest first; none where the browser keeps nothing. */
export async function all() {
  try {
    return (await transact("readonly", (kept) => kept.getAll())).sort((a, b) => b.changed - a.changed);
  } catch {
    return [];
  }
}

export const keep = (talk) => transact("readwrite", (kept) => kept.put(talk)).catch(() => {});
export const forget = (id) => transact("readwrite", (kept) => kept.delete(id)).catch(() => {});
