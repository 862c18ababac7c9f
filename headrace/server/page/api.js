// The server's API. The key stays in memory, or in the tab's storage on request, and is never part of an address.

let key = sessionStorage.getItem("headrace-key") ?? "";

export function setKey(value, remember) {
  key = value;
  if (remember) sessionStorage.setItem("headrace-key", value);
  else sessionStorage.removeItem("headrace-key");
}

/** An answer other than success. `param` names the field at fault. */
export class ApiError extends Error {
  constructor(status, message, param, retryAfter) {
    super(message);
    this.status = status;
    this.param = param;
    this.retryAfter = retryAfter;
  }
}

export async function call(path, options = {}) {
  const headers = { ...(options.body ? { "Content-Type": "application/json" } : {}), ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  let message = `the server answered ${response.status}`, param = null;
  try {
    const { error } = await response.json();
    message = error.message;
    param = error.param;
  } catch { /* The answer has no body of ours. */ }
  throw new ApiError(response.status, message, param, response.headers.get("Retry-After"));
}

/** Yields the objects of a streamed chat completion. Throws ApiError for an error within the stream. */
export async function* stream(body, signal) {
  const response = await call("v1/chat/completions", { method: "POST", body: JSON.stringify({ ...body, stream: true }), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "", ended = false;
  for (;;) {
    const { value, done } = await reader.read();
    text += value ?? "";
    const events = text.split(/\r?\n\r?\n/);
    text = events.pop();
    for (const event of events) {
      const data = event.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") ended = true;
      else if (data) {
        const object = JSON.parse(data);
        if (object.error) throw new ApiError(500, object.error.message, object.error.param);
        yield object;
      }
    }
    if (done) break;
  }
  if (!ended) throw new ApiError(500, "the answer was cut off");
}

/** Names and values of the server's metrics, summed over labels. */
export async function metrics() {
  const text = await (await call("metrics")).text();
  const found = new Map();
  for (const line of text.split("\n")) {
    const sample = line.match(/^([a-z_]+)(?:\{[^}]*\})? (\S+)/);
    if (sample) found.set(sample[1], (found.get(sample[1]) ?? 0) + Number(sample[2]));
  }
  return found;
}
