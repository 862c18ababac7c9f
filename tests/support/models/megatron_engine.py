"""Engines over models of Megatron-core, and what the models say themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from headrace import LLM, SamplingParams
from support.models import megatron

TOLERANCE = 1e-4
SHARED = [11, 5, 42, 7, 63, 20, 8, 77, 31]
PROMPTS = [
    [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50],
    [*SHARED, 1, 2, 3],
    [9],
    [*SHARED, 4, 5],
    [27, 18, 28, 18, 28],
    [*SHARED, 1, 2, 3, 4, 4, 4, 4],
]
Reference = Callable[[Sequence[int]], torch.Tensor]


def engine(model: Any, **changes: Any) -> LLM:
    """In which prompts come in chunks beside decode rows, and six sequences do not fit at once."""
    fields: dict[str, Any] = {"num_kv_blocks": 24, "block_size": 4, "max_num_batched_tokens": 11, "max_num_seqs": 6}
    return LLM.from_megatron(model, model.config, changes.pop("tokenizer", None), **{**fields, "max_model_len": 64, **changes})


def generate(llm: LLM, prompts: Sequence[list[int]], count: int = 12) -> list[Any]:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=0)
    return [output.outputs[0] for output in llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)]


def tokens_of(llm: LLM, prompt: list[int], count: int = 8) -> list[int]:
    return list(generate(llm, [prompt], count)[0].token_ids)


def assert_same(llm: LLM, reference: Reference, prompts: Sequence[list[int]] = PROMPTS) -> None:
    """The reference's greedy tokens and their logprobs."""
    for prompt, out in zip(prompts, generate(llm, prompts), strict=True):
        tokens = list(out.token_ids)
        logprobs = reference([*prompt, *tokens])[len(prompt) - 1 : -1].cpu()
        assert logprobs.argmax(-1).tolist() == tokens
        given = [entry[token].logprob for entry, token in zip(out.logprobs, tokens, strict=True)]
        expected = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (torch.tensor(given) - expected).abs().max() < TOLERANCE


def assert_same_every_way(llm: LLM, reference: Reference) -> None:
    """All prompts at once, with too few blocks for all; then again, from the prefix cache; then each alone."""
    assert_same(llm, reference)
    assert llm.stats.num_preemptions > 0
    before = llm.stats.prefix_hit_tokens
    assert_same(llm, reference, PROMPTS[::-1])
    assert llm.stats.prefix_hit_tokens > before
    for prompt in PROMPTS[:3]:
        assert_same(llm, reference, [prompt])
    llm.check_integrity()


def eager(model: Any, *, channels: int = 8, base: float = 10000.0, window: int | None = None, **options: Any) -> Reference:
    turned = megatron.angles(megatron.CONTEXT, channels, base, **options) if channels else None
    return lambda tokens: megatron.eager_logprobs(model, tokens, turned, window)


MLA: dict[str, Any] = {
    "mla": True,
    "num_query_groups": 4,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
}
OWN: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "QK-norm": {"qk_layernorm": True, "spec": {"qk_layernorm": True}},
    "scaled frequencies": {"model": {"rope_scaling": True, "rope_scaling_factor": 4.0, "rotary_base": 20000000}},
    "stretched positions": {"model": {"seq_len_interpolation_factor": 4.0}},
    "experts": {"num_moe_experts": 4, "moe_router_topk": 2, "spec": {"num_experts": 4}},
    "experts for all and some": {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_shared_expert_intermediate_size": 24,
        "moe_layer_freq": [0, 1, 1],
        "spec": {"num_experts": 4},
    },
    "experts with a bias": {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 1.5,
        "spec": {"num_experts": 4},
    },
    "latent, YaRN": {**MLA, "q_lora_rank": 12, "rotary_scaling_factor": 8.0, "original_max_position_embeddings": 16},
    "latent, queries direct, plain rotary": {**MLA, "q_lora_rank": None, "rope_type": "rope"},
    "latent with experts": {
        **MLA,
        "q_lora_rank": 12,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "spec": {"num_experts": 4},
    },
    "learned sinks": {"softmax_type": "learnable"},
    "sinks of zero": {"softmax_type": "off-by-one"},
}


def train_step(model: Any, rate: float = 0.5) -> None:
    """One step of a trainer, with Megatron's own attention, dropout and loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    ids = torch.tensor([[5, 9, 33, 2, 71, 8]])
    places = torch.arange(6)
    mask = (places[None] > places[:, None])[None, None]
    with megatron.no_device_asked_for():
        loss = model(ids[:, :-1], places[None, :-1], mask[..., :-1, :-1], labels=ids[:, 1:]).mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: Any) -> list[Any]:
    modules = [(name, id(module), module.training) for name, module in model.named_modules()]
    parameters = [(name, id(p), p.data_ptr(), p.requires_grad, p.grad is None) for name, p in model.named_parameters()]
    return [modules, parameters, list(model.state_dict()), torch.is_grad_enabled(), torch.get_num_threads()]
