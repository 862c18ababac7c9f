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
