"""Sparse prompts through whole engines: any implementation of a model, and requests that a server cannot serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.runner.harness import prompt
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from headrace.errors import RequestError
from headrace.frontend.llm import LLM
from headrace.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=1)
SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


def saved(folder: Path, kind: str) -> Path:
    torch.manual_seed(3)
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
    if kind == "mistral":
        model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=40))
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def engine(folder: Path, **options: Any) -> LLM:
    defaults = {"skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "kv_cache_memory": 2**24}
    return LLM(str(folder), **defaults | options)


def test_every_implementation_attends_alike(tmp_path: Path) -> None:
    """The selector lives in the attention backend, so transformers' module of a model gives what headrace's gives."""
    folder, asked = saved(tmp_path, "llama"), {"prompt_token_ids": prompt(5, 700)}
    found = []
    for impl in ("native", "transformers"):
        with engine(folder, model_impl=impl, sparse_prefill="xattn", sparse_threshold=0.5, sparse_min_tokens=200) as llm:
            (output,) = llm.generate([asked], GREEDY)
            (short,) = llm.generate([{"prompt_token_ids": prompt(5, 199)}], GREEDY)
            (wanted,) = llm.generate([{"prompt_token_ids": prompt(8, 199)}], GREEDY.replace({"sparse_prefill": True}))
        assert output.attention is not None and 0.2 < (output.attention.density or 0) < 0.95
        assert short.attention is None
        assert wanted.attention is not None and wanted.attention.computed == 3
        found.append((output.outputs[0].token_ids, output.attention.layers, output.outputs[0].cumulative_logprob))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1]) and found[0][2] == pytest.approx(found[1][2], abs=1e-3)


def test_an_fp8_cache_is_read_sparsely(tmp_path: Path) -> None:
    """The result equals that of dense attention to the same cache if every block is kept; if some are, chunks and prefix hits
    change nothing."""
    folder, asked, greedy = saved(tmp_path, "llama"), {"prompt_token_ids": prompt(5, 400)}, GREEDY.replace({"max_tokens": 2})
    options = {"kv_cache_dtype": "fp8_e4m3", "sparse_prefill": "xattn", "sparse_min_tokens": 0, "kv_cache_memory": 2**21}
    options["attention_backend"] = "reference"
    with engine(folder, sparse_threshold=1.0, enable_prefix_caching=False, **options) as llm:
        assert llm._engine.config.cache.dtype == "fp8_e4m3"
        (sparse,) = llm.generate([asked], greedy)
        (dense,) = llm.generate([asked], greedy.replace({"sparse_prefill": False}))
    assert sparse.attention is not None and sparse.attention.density == 1.0
    assert sparse.outputs[0].token_ids == dense.outputs[0].token_ids
    assert sparse.outputs[0].cumulative_logprob == pytest.approx(dense.outputs[0].cumulative_logprob, abs=1e-3)
    with engine(folder, sparse_threshold=0.5, **options) as llm:
        whole, hit = (llm.generate([asked], greedy)[0] for _ in range(2))
        assert llm.stats.prefix_hit_tokens >= 256
    with engine(folder, sparse_threshold=0.5, max_num_batched_tokens=256, **options) as llm:
        (chunked,) = llm.generate([asked], greedy)
    assert whole.attention is not None and (whole.attention.density or 0) < 1
    for other in (hit, chunked):
        assert other.outputs[0].token_ids == whole.outputs[0].token_ids
        assert other.outputs[0].cumulative_logprob == pytest.approx(whole.outputs[0].cumulative_logprob, abs=1e-3)


def test_layers_that_cannot_stay_dense_and_are_named(tmp_path: Path) -> None:
    folder = saved(tmp_path, "mistral")
    with pytest.raises(Exception, match=r"no layer of this model can attend sparsely: it has a sliding window"):
        engine(folder, sparse_prefill="xattn")
    with (
        engine(folder) as llm,
        pytest.raises(RequestError, match=r"prompts of this server attend densely \(--sparse-prefill\)") as caught,
    ):
        llm.generate([{"prompt_token_ids": [3, 4]}], GREEDY.replace({"sparse_prefill": True}))
    assert caught.value.param == "sparse_prefill"


def test_a_live_megatron_model_attends_sparsely(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'headrace[megatron]'")
    from support.models import megatron

    monkeypatch.setattr(megatron, "CONTEXT", 768)
    model = megatron.gpt()
    tokens = {"prompt_token_ids": [token % megatron.VOCAB for token in prompt(6, 600)]}
    found = {}
    for threshold in (0.5, 1.0):
        options: dict[str, Any] = {"sparse_prefill": "xattn", "sparse_threshold": threshold, "sparse_min_tokens": 100}
        with LLM.from_megatron(model, model.config, None, kv_cache_memory=2**23, **options) as llm:
            (sparse,) = llm.generate([tokens], GREEDY)
            (dense,) = llm.generate([tokens], GREEDY.replace({"sparse_prefill": False}))
        assert sparse.attention is not None
        found[threshold] = sparse.attention.density
        if threshold == 1.0:
            assert sparse.outputs[0].token_ids == dense.outputs[0].token_ids
    assert found[1.0] == 1.0 and 0.3 < (found[0.5] or 0) < 0.9
