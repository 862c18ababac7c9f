"""A stub of the part of vLLM that the peer's script uses: it generates zeros at once."""

from __future__ import annotations

VLLM = """
import time, types

class SamplingParams:
    def __init__(self, **given):
        assert given["ignore_eos"] and given["min_tokens"] == given["max_tokens"] and given["temperature"] == 0.6
        self.count = given["max_tokens"]

class FullAttentionSpec:
    block_size, page_size_bytes, num_kv_heads, head_size = 16, 2048, 2, 16

class LLM:
    def __init__(self, **given):
        assert given["load_format"] == "dummy" and given["trust_remote_code"] is False and not given["enable_prefix_caching"]
        print("(EngineCore pid=7) INFO 11-21 10:00:00 [kv.py:1] GPU KV cache size: 1,234 tokens")
        print("INFO Maximum concurrency for 512 tokens per request: 2.41x")
        self.impl = given["model_impl"]
        group = types.SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=FullAttentionSpec())
        tensors = [types.SimpleNamespace(size=4096)] * 2
        cache = types.SimpleNamespace(num_blocks=2, kv_cache_groups=[group], kv_cache_tensors=tensors)
        runner = types.SimpleNamespace(kv_cache_config=cache)
        self.worker = types.SimpleNamespace(available_kv_cache_memory_bytes=9000, model_runner=runner)

    def collective_rpc(self, method):
        return [method(self.worker)]

    def apply_model(self, function):
        if self.impl == "transformers":
            raise RuntimeError("functions are not sent")
        layer = types.SimpleNamespace(attn_backend=types.SimpleNamespace(get_name=lambda: "FLASH_ATTN"))
        return [function(types.SimpleNamespace(modules=lambda: [layer, layer, object()]))]

    def generate(self, prompts, params, use_tqdm):
        time.sleep(0.01)
        made = [types.SimpleNamespace(token_ids=[0] * each.count) for each in params]
        return [types.SimpleNamespace(outputs=[each]) for each in made]
"""
