"""What trainers read, over a real runner: logits that are not rounded."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from headrace.errors import ConfigError


def test_the_heads_product_is_not_rounded(tiny_folder: Path) -> None:
    """In bfloat16, many of 272 logits are equal."""
    args = {"load_format": "dummy", "dtype": "bfloat16", "max_logprobs": -1, "num_kv_blocks": 40, "max_num_seqs": 4}
    params = SamplingParams(max_tokens=1, logprobs=-1)
    distinct = {}
    for head in ("auto", "float32"):
        with LLM(str(tiny_folder), head_dtype=head, **args) as llm:
            [output] = llm.generate("a", params)
            [position] = output.outputs[0].logprobs
            distinct[head] = len({entry.logprob for entry in position.values()})
    assert distinct["auto"] < 250 < distinct["float32"]


def test_a_head_in_float32_follows_updates(tiny_folder: Path) -> None:
    """No copy of the matrix is kept."""
    args = {"load_format": "dummy", "dtype": "bfloat16", "head_dtype": "float32", "num_kv_blocks": 40, "max_logprobs": 1}
    params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=1, ignore_eos=True)
    with LLM(str(tiny_folder), **args) as llm:
        before = llm.generate("a", params)[0].outputs[0].logprobs
        head = llm._engine.executor.model.lm_head.weight.clone()
        for new, same in ((head.flip(0), False), (head, True)):
            assert llm.update_weights({"lm_head.weight": new}) == 1
            llm.reset_prefix_cache()
            assert (llm.generate("a", params)[0].outputs[0].logprobs == before) == same


def test_foreign_heads_are_refused(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="head_dtype float32 is for native models"):
        LLM(str(tiny_folder), model_impl="transformers", load_format="dummy", dtype="bfloat16", head_dtype="float32")
