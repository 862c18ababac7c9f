"""Megatron-core models on a GPU, against Megatron's own forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.models import megatron

from headrace import LLM, SamplingParams
from headrace.errors import EngineError

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'headrace[megatron]'")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BOUNDS = {torch.float32: (5e-3, 5e-4), torch.bfloat16: (0.6, 0.06)}
"""Largest and mean difference of logprobs, in nats."""
WIDE: dict[str, Any] = {"hidden_size": 256, "kv_channels": 64, "ffn_hidden_size": 384, "std": 0.06}
EXPERTS: dict[str, Any] = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 128, "spec": {"num_experts": 8}}
MLA: dict[str, Any] = {
    "mla": True,
    "num_query_groups": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "rotary_scaling_factor": 8.0,
    "original_max_position_embeddings": 16,
}
KINDS: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "QK-norm": {"qk_layernorm": True, "spec": {"qk_layernorm": True}},
    "experts": EXPERTS,
    "mla": MLA,
    "latent with experts": {**MLA, **EXPERTS},
}
CASES = [
    pytest.param(kind, dtype, id=f"{kind}, {dtype}")
    for kind in KINDS
    for dtype in BOUNDS
    # Experts that are nearly tied are chosen by rounding in 16 bits.
    if dtype is torch.float32 or "experts" not in kind
]
PROMPTS = [
    [(7 * i * i + 3 * i + start) % megatron.VOCAB for i in range(length)]
    for start, length in ((1, 40), (5, 3), (1, 33), (9, 1))
]


@pytest.fixture(autouse=True)
def as_installed() -> Any:
    with contextlib.ExitStack() as stack:
        for patch in megatron.without_transformer_engine():
            stack.enter_context(patch)
        yield


def engine(model: Any, **changes: Any) -> LLM:
    fields = {"num_kv_blocks": 24, "max_num_batched_tokens": 24, "max_num_seqs": 4, "max_model_len": 96}
    return LLM.from_megatron(model, model.config, None, **fields | changes)


def assert_as_megatron(llm: LLM, model: Any, dtype: torch.dtype) -> None:
    """Greedy outputs, whose tokens must be as likely as Megatron says, and as likely as the ones that it would take."""
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0)
    largest, mean = BOUNDS[dtype]
    errors: list[torch.Tensor] = []
    for prompt, output in zip(PROMPTS, llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params), strict=True):
        out = output.outputs[0]
        tokens: Sequence[int] = out.token_ids
        logprobs = megatron.own_logprobs(model, [*prompt, *tokens])[len(prompt) - 1 : -1].cpu()
        expected = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        given = torch.tensor([entry[token].logprob for entry, token in zip(out.logprobs, tokens, strict=True)])
        assert (logprobs.amax(-1) - expected).max() <= largest
        errors.append((given - expected).abs())
    together = torch.cat(errors)
    assert together.max() <= largest
    assert together.mean() <= mean


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_as_megatron_itself(kind: str, dtype: torch.dtype) -> None:
    """In chunks beside decode rows; again with prefixes from the cache."""
    model = megatron.gpt(device="cuda", dtype=dtype, bf16=dtype is torch.bfloat16, **WIDE | KINDS[kind])
    llm = engine(model)
    assert_as_megatron(llm, model, dtype)
    hits = llm.stats.prefix_hit_tokens
    assert_as_megatron(llm, model, dtype)
    assert llm.stats.prefix_hit_tokens > hits
    graphs = [line.value for line in llm.info.decisions if line.name == "CUDA graphs"]
    assert (graphs == ["none"]) == ("experts" in kind)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_parity_is_with_megatrons_own_forward(dtype: torch.dtype) -> None:
    """In 16 bits that is the measure of rounding, and its modules in float32 are what is right."""
    model = megatron.gpt(device="cuda", dtype=dtype, bf16=dtype is torch.bfloat16, **WIDE)
    parity = engine(model).parity()
    exact = dtype is torch.float32
    assert parity.reference == f"Megatron's {'own forward' if exact else 'modules, eager attention'}, float32"
    assert [line.name for line in parity.lines] == [*([] if exact else ["Megatron's own forward"]), "megatron"]
    assert not parity.lines[-1].diverging
    assert parity.passed if not exact else parity.lines[-1].max_error <= BOUNDS[dtype][0]


def test_graphs_that_were_captured_read_the_weights_of_today() -> None:
    model = megatron.gpt(device="cuda", **WIDE)
    llm = engine(model)
    assert_as_megatron(llm, model, torch.float32)
    for parameter in model.decoder.parameters():
        parameter.data.add_(0.02 * torch.randn_like(parameter))
    assert_as_megatron(llm, model, torch.float32)
    model.decoder.layers[0].mlp.linear_fc2.weight.data = model.decoder.layers[0].mlp.linear_fc2.weight.data.clone()
    with pytest.raises(EngineError, match="other memory"):
        llm.generate({"prompt_token_ids": [3]}, SamplingParams(max_tokens=2))


def test_a_model_in_train_mode_rolls_out_without_dropout_and_trains_on() -> None:
    model = megatron.gpt(device="cuda", **WIDE)
    llm = engine(model)
    model.train()
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    outputs = {tuple(llm.generate({"prompt_token_ids": PROMPTS[0]}, params)[0].outputs[0].token_ids) for _ in range(3)}
    assert len(outputs) == 1
    ids = torch.tensor([PROMPTS[0]], device="cuda")
    places = torch.arange(ids.shape[1], device="cuda")
    mask = (places[None] > places[:, None])[None, None]
    model(ids, places[None], mask, labels=ids).mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_model_on_another_device_than_the_current_is_refused() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model = megatron.gpt(device="cuda:1", **WIDE)
    with pytest.raises(Exception, match="set_device"):
        engine(model)
