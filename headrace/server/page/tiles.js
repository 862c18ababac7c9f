// The server's load, read from its metrics.
import { metrics } from "./api.js";
import { h, sparkline } from "./dom.js";

const history = new Map();
let last = null;

/** Reads the metrics while their tiles are to be seen. */
export async function watch(tiles) {
  if (document.hidden || !tiles.checkVisibility()) return;
  try {
    const now = await metrics();
    const since = (name) => (last ? now.get(name) - last.values.get(name) : 0);
    const passed = last ? (performance.now() - last.at) / 1000 : 1;
    const mean = (name) => {
      const count = since(`headrace_${name}_count`);
      return count ? `${((1000 * since(`headrace_${name}_sum`)) / count).toFixed(1)} ms` : "\u2013";
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
