"""Choices of experts that a request gets back: of every token, however it was computed."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models.tiny_llama import write_config
from torch.utils._python_dispatch import TorchDispatchMode

from headrace import LLM, SamplingParams
from headrace.config import EngineArgs
from headrace.errors import ConfigError, RequestError
from headrace.frontend.limits import check_limits
from headrace.layers.moe import ExpertRouter, Experts
from headrace.models.decoder import Decoder
from headrace.outputs import ExpertLayers, RoutedExperts
from headrace.resolve.model import recorded_experts
from headrace.server.shape.generate import routed_int32, routed_npy, routed_raw

MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
SHAPE = ExpertLayers([0, 2], 3, 2, False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("mixture"), **MIXTURE)


def build(folder: Path, **args: Any) -> LLM:
    options = {"load_format": "dummy", "dtype": "float32", "enable_return_routed_experts": True, "block_size": 4}
    return LLM(str(folder), **options | {"max_num_seqs": 4, "num_kv_blocks": 200} | args)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with build(folder) as one:
        yield one


def params(**fields: Any) -> SamplingParams:
    fixed = {"max_tokens": 9, "temperature": 1.0, "seed": 3, "ignore_eos": True, "return_routed_experts": True}
    return SamplingParams(**fixed | fields)


PROMPTS = [
    {"prompt_token_ids": [(7 * i + start) % 256 for i in range(length)]} for start, length in ((1, 30), (1, 41), (9, 22))
]


def rows(output: RoutedExperts | None) -> np.ndarray:
    assert output is not None and output.shape == SHAPE
    return np.frombuffer(output.data, np.uint8).reshape(-1, 2, 2)


def samples(llm: LLM, **fields: Any) -> list[tuple[list[int], np.ndarray]]:
    found = llm.generate(PROMPTS, params(**fields))
    return [(sample.token_ids, rows(sample.routed_experts)) for result in found for sample in result.outputs]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[tuple[list[int], np.ndarray]]:
    """Each sample of each prompt computed by itself, in one chunk, without a cache."""
    found = []
    with build(folder, enable_prefix_caching=False) as llm:
        for prompt in PROMPTS:
            for sample in llm.generate(prompt, params(n=3))[0].outputs:
                [again] = llm.generate(
                    {"prompt_token_ids": prompt["prompt_token_ids"] + sample.token_ids}, params(max_tokens=1)
                )
                found.append((sample.token_ids, rows(again.outputs[0].routed_experts)[:-1]))
    return found


def test_they_are_what_the_routers_chose(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    choose = ExpertRouter.choose

    def watched(self: ExpertRouter, x: torch.Tensor, readers: Experts) -> tuple[torch.Tensor, torch.Tensor, Any]:
        chosen = choose(self, x, readers)
        seen.append(chosen[0].clone())
        return chosen

    monkeypatch.setattr(ExpertRouter, "choose", watched)
    [result] = llm.generate(PROMPTS[0], params(max_tokens=1))
    assert np.array_equal(rows(result.outputs[0].routed_experts), torch.stack(seen, dim=1).numpy())
    assert len({*map(tuple, rows(result.outputs[0].routed_experts).reshape(-1, 2).tolist())}) > 5


def test_with_their_weights_they_replay_a_layer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids and weights that come back, of a prompt in chunks, make of a layer's inputs its very outputs."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    forward = Experts.forward

    def watched(self: Experts, x: torch.Tensor, *routed: torch.Tensor) -> torch.Tensor:
        out = forward(self, x, *routed)
        seen.append((x.clone(), out.clone()))
        return out

    with build(folder, enable_return_routed_weights=True, max_num_batched_tokens=8) as llm:
        monkeypatch.setattr(Experts, "forward", watched)
        [result] = llm.generate(PROMPTS[0], params(max_tokens=4))
        monkeypatch.undo()
        routed = result.outputs[0].routed_experts
        assert routed is not None and routed.shape.weighted
        ids = torch.frombuffer(bytearray(routed.data), dtype=torch.uint8).view(-1, 2, 2).int()
        weights = torch.frombuffer(bytearray(routed.weights), dtype=torch.float32).view(-1, 2, 2)
        mixtures = [module for module in llm._engine.executor.model.modules() if isinstance(module, Experts)]
        assert len(mixtures) == 2
        for layer, mixture in enumerate(mixtures):
            at = 0
            for x, out in seen[layer::2]:
                own = slice(at, at + len(x))
                assert torch.equal(mixture(x, ids[own, layer].contiguous(), weights[own, layer].contiguous()), out)
                at += len(x)
            assert at == len(ids) == len(weights)
    encoded = routed_int32(routed, 0, len(ids) + 1), routed_raw(routed)
    sent = np.frombuffer(base64.b64decode(encoded[0]["routed_weights"]), "<f4").reshape(len(ids), 3, 2)
    assert np.array_equal(sent[:, [0, 2]], weights.numpy()) and not sent[:, 1].any()
    assert encoded[1]["routed_weights"]["dtype"] == "float32"
    with pytest.raises(ConfigError, match="needs enable_return_routed_experts"):
        build(folder, enable_return_routed_experts=False, enable_return_routed_weights=True)


def same(found: list[tuple[list[int], np.ndarray]], expected: list[tuple[list[int], np.ndarray]]) -> None:
    assert len(found) == len(expected) == 9
    for (tokens, experts), (other_tokens, other) in zip(found, expected, strict=True):
        assert tokens == other_tokens
        assert np.array_equal(experts, other)


def test_samples_and_cached_prefixes(llm: LLM, alone: list[tuple[list[int], np.ndarray]]) -> None:
    """The first two prompts have a prefix in common, which is in the cache by now."""
    for _ in range(2):
        found = samples(llm, n=3)
        same(found, alone)
    lengths = [len(prompt["prompt_token_ids"]) + 9 - 1 for prompt in PROMPTS]
    assert [len(experts) for _, experts in found] == [length for length in lengths for _ in range(3)]
    [hit] = llm.generate(PROMPTS[0], params(return_routed_experts=False))
    assert hit.num_cached_tokens > 0 and hit.outputs[0].routed_experts is None
    [first, second, other] = llm.generate(PROMPTS, params(n=3))
    assert (first.num_cached_tokens, second.num_cached_tokens, other.num_cached_tokens) == (28, 40, 20)


def test_cached_blocks_without_rows_are_computed_again(llm: LLM, alone: list[tuple[list[int], np.ndarray]]) -> None:
    """Those of requests that did not ask. Blocks that are given back for others take their rows with them."""
    llm.reset_prefix_cache()
    prompt = PROMPTS[0]["prompt_token_ids"]
    llm.generate({"prompt_token_ids": prompt[:14]}, params(max_tokens=1))
    llm.generate(PROMPTS[0], params(max_tokens=1, return_routed_experts=False))
    for cached in (12, 28):
        [result] = llm.generate(PROMPTS[0], params())
        assert result.num_cached_tokens == cached
        assert np.array_equal(rows(result.outputs[0].routed_experts), alone[0][1])
    [conversation] = llm.generate({"prompt_token_ids": prompt + alone[0][0] + [3, 4]}, params(max_tokens=1))
    assert conversation.num_cached_tokens == 36
    assert np.array_equal(rows(conversation.outputs[0].routed_experts)[: len(alone[0][1])], alone[0][1])
    for start in range(3, 40):
        llm.generate({"prompt_token_ids": [(5 * i + start) % 256 for i in range(41)]}, params(max_tokens=1))
    kv = llm._engine.core.scheduler.kv
    kept = [key.rows for key in kv._with_rows._keys.values()]
    assert all(len(one) == 4 * 4 for one in kept) and len(kept) < 200
    [result] = llm.generate(PROMPTS[0], params())
    assert np.array_equal(rows(result.outputs[0].routed_experts), alone[0][1])


@pytest.mark.parametrize("args", [{"max_num_batched_tokens": 8}, {"num_kv_blocks": 26, "pipeline_depth": 2}], ids=str)
def test_chunks_and_preemption(folder: Path, alone: list[tuple[list[int], np.ndarray]], args: dict[str, Any]) -> None:
    with build(folder, **args) as llm:
        same(samples(llm, n=3), alone)
        assert (llm.stats.num_preemptions > 0) == ("num_kv_blocks" in args)


class Operations(TorchDispatchMode):
    """Counts what is computed, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_they_cost_a_copy_a_layer_and_a_gather_a_step(folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that do not ask pay for the copies alone; no layer waits for the host."""
    # Where experts are recorded, the last layer computes all tokens of a prompt.
    monkeypatch.setattr(Decoder, "selects", lambda *given: False)
    steps, found = 5, []
    with build(folder, enable_return_routed_experts=False) as plain:
        for engine, asks in ((plain, False), (llm, False), (llm, True)):
            engine.reset_prefix_cache()
            with Operations() as operations:
                engine.generate(PROMPTS[0], params(max_tokens=steps, return_routed_experts=asks))
            found.append(operations.counts)
    without, recorded, asked = found
    assert recorded - without == {"copy_": steps * len(SHAPE.layers)} and not without - recorded
    assert sum((asked - recorded).values()) <= 3 * steps and not recorded - asked


def test_a_stop_string_ends_them_with_the_tokens(llm: LLM) -> None:
    [result] = llm.generate(PROMPTS[2], params(ignore_eos=False))
    text = result.outputs[0].text
    [cut] = llm.generate(PROMPTS[2], params(stop=[text[2]], ignore_eos=False))
    tokens = cut.outputs[0].token_ids
    assert len(tokens) < 9
    assert len(rows(cut.outputs[0].routed_experts)) == 22 + len(tokens) - 1


def test_encodings() -> None:
    for wide, dtype in ((False, "uint8"), (True, "uint16")):
        chosen = np.arange(12, dtype=dtype).reshape(3, 2, 2)
        routed = RoutedExperts(chosen.tobytes(), ExpertLayers([0, 2], 3, 2, wide))
        whole = np.zeros((3, 3, 2), dtype)
        whole[:, [0, 2]] = chosen
        npy = np.load(io.BytesIO(base64.b64decode(routed_npy(routed)["routed_experts"])))
        assert npy.dtype == dtype and np.array_equal(npy, whole)
        raw = routed_raw(routed)["routed_experts"]
        assert (raw["shape"], raw["start"], raw["dtype"]) == ([3, 3, 2], 0, dtype)
        assert base64.b64decode(raw["data"]) == whole.tobytes()
        meta = routed_int32(routed, 1, 4)
        assert meta["routed_experts_start_len"] == 1
        assert np.array_equal(np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4").reshape(2, 3, 2), whole[1:])


def test_who_cannot_have_them(folder: Path, tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="this model has none"):
        build(tiny_folder)
    with pytest.raises(ConfigError, match="set sparse_prefill off"):
        build(folder, sparse_prefill="xattn", max_num_batched_tokens=256)
    foreign: Any = object()
    with pytest.raises(ConfigError, match="for native models"):
        recorded_experts(EngineArgs(enable_return_routed_experts=True), foreign, sparse=False)
    without = EngineArgs(model=str(folder), load_format="dummy")
    with pytest.raises(RequestError, match="--enable-return-routed-experts"):
        check_limits(params(), without)
