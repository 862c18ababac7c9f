"""Each family computes on several ranks what it computes on one; ranks hold their parts and nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from support.models.cases import CASES, pair, prompt
from support.models.export import export
from support.models.harness import Bench, copy_weights, model_spec, random_model
from support.thread_ranks import on_ranks

from headrace.attention.context import TokenKinds
from headrace.errors import ConfigError
from headrace.layers.linear import Linear
from headrace.model_spec import CLAMPED_SWIGLU, AttentionSpec, DenseSpec, ModelSpec, MoeSpec, RopeSpec
from headrace.models import registry
from headrace.models.cuts import checked_cuts, num_sums
from headrace.models.decoder import Decoder, DecoderAttention, DecoderLayer
from headrace.parallel.layout import ParallelSizes, describe, shard_model, workable_sizes
from models.families.test_families import close

STEPS = 5
WORKS = [name for name in CASES if name not in ("llama-head-dim", "llama-uneven-narrow-v", "qwen3-uneven")]
REFUSED = [name for name in CASES if name not in WORKS]


def parts(whole: ModelSpec, size: int, **sizes: bool) -> list[ModelSpec]:
    return [shard_model(whole, rank, ParallelSizes(size, **sizes)) for rank in range(size)]


def same_on_ranks(
    whole: Decoder,
    state: dict[str, torch.Tensor],
    specs: list[ModelSpec],
    steps: int = STEPS,
    lengths: tuple[int, int] = (1, 13),
) -> None:
    """Tokens and logprobs of every rank are those of the whole model; ranks have the same bits."""
    prompts = [prompt(length) for length in lengths]
    prompts = [[token % whole.spec.vocab_size for token in one] for one in prompts]
    expected, expected_logits = Bench(whole).generate(prompts, steps)

    def run(group: Any) -> tuple[list[list[int]], list[torch.Tensor]]:
        model = registry.build(specs[group.rank], "float32", "cpu", group)
        copy_weights(model, state)
        return Bench(model).generate(prompts, steps)

    found = on_ranks(len(specs), run)
    for tokens, logits in found:
        assert tokens == expected
        for ours, one in zip(logits, expected_logits, strict=True):
            close(ours, one)
    for _, logits in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0][1], logits, strict=True)), "ranks have other bits"


@pytest.mark.parametrize("name", WORKS)
def test_two_ranks_say_what_one_says(name: str) -> None:
    theirs, whole = pair(name)
    same_on_ranks(whole, theirs.state_dict(), parts(whole.spec, 2))


@pytest.mark.parametrize("name", REFUSED)
def test_heads_that_cannot_be_dealt_out_are_refused_with_the_sizes_that_work(name: str) -> None:
    _, whole = pair(name)
    works = workable_sizes(whole.spec)
    assert 1 in works and 2 not in works
    with pytest.raises(
        ConfigError, match=f"layer .*cannot be dealt to 2 ranks; sizes that work: {str(works)[1:-1]}$"
    ) as caught:
        parts(whole.spec, 2)
    assert caught.value.param == "tensor_parallel_size"


def attention(layer: int, **changes: Any) -> AttentionSpec:
    values = {"layer": layer, "num_heads": 12, "num_kv_heads": 4, "head_dim": 8, "v_head_dim": 6, "scale": 0.4}
    return AttentionSpec(**values | {"rotary_dim": 4, "rope": RopeSpec(10000.0)} | changes)


def made(layers: list[AttentionSpec], **changes: Any) -> tuple[Decoder, dict[str, torch.Tensor]]:
    whole = random_model(model_spec(layers, **changes))
    return whole, dict(export(registry.name_table(whole.spec), whole))


@pytest.mark.parametrize(("kv_heads", "sizes"), [(1, (2, 4)), (2, (2, 4)), (3, (3, 6)), (4, (2, 4)), (12, (2, 4, 6))])
def test_kv_heads_are_dealt_out_or_copied(kv_heads: int, sizes: tuple[int, ...]) -> None:
    whole, state = made([attention(0, num_kv_heads=kv_heads)], mlps=(DenseSpec(48, bias=True),), output_bias=True)
    for size in sizes:
        specs = parts(whole.spec, size)
        assert {layer.num_kv_heads for spec in specs for layer in spec.layers} == {max(1, kv_heads // size)}
        same_on_ranks(whole, state, specs, steps=3)


def test_layers_of_every_kind_on_four_ranks() -> None:
    """Heads a layer, sinks, gates, shared KV, values of the keys, and a tied vocabulary of which a rank holds padding alone."""
    layers = [
        attention(0, num_heads=8, num_kv_heads=2, sinks=True),
        attention(1, num_kv_heads=1, window=5, output_gate=True),
        attention(2, num_heads=4, head_dim=6, v_head_dim=6, v_from_k=True, rotary_dim=0, rope=None),
        attention(3, num_kv_heads=1, kv_source=1, window=5),
    ]
    for tied in (True, False):
        whole, state = made(layers, tie_word_embeddings=tied, qk_norm=True, attention_bias=True, vocab_size=150)
        specs = parts(whole.spec, 4)
        assert [spec.head_rows for spec in specs] == [64] * 4 and specs[3].shard is not None
        assert specs[3].shard.vocab_start == 192 and specs[3].shard.cut_embedding is tied
        same_on_ranks(whole, state, specs, steps=3)


MOE = {"num_experts": 5, "top_k": 2, "intermediate_size": 128}


GPT_OSS = {"bias": True, "act": CLAMPED_SWIGLU}


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("LlamaForCausalLM", {}), ("GptOssForCausalLM", GPT_OSS), ("LlamaForCausalLM", {"shared": DenseSpec(24, bias=True)})],
)
def test_experts_are_sliced_or_dealt_out(architecture: str, changes: dict) -> None:
    whole, state = made([attention(0)], mlps=(MoeSpec(**MOE | changes),), architecture=architecture)
    sliced, dealt = parts(whole.spec, 2), parts(whole.spec, 2, whole_experts=True)
    assert [spec.mlps[0].intermediate_size for spec in sliced] == [64, 64]
    assert [spec.mlps[0].held for spec in dealt] == [(0, 2), (2, 5)]
    same_on_ranks(whole, state, sliced)
    same_on_ranks(whole, state, dealt)
    four = parts(whole.spec, 4)
    assert [spec.mlps[0].num_held for spec in four] == [1, 1, 1, 2]
    same_on_ranks(whole, state, four)
    with pytest.raises(ConfigError, match=r"layer 0: 5 experts cannot be dealt to 12 ranks; sizes that work: 1, 2, 4"):
        parts(whole.spec, 12)


@pytest.mark.parametrize("whole_experts", [False, True])
def test_experts_of_pictures_are_sliced_or_dealt_out(whole_experts: bool) -> None:
    """The experts have other widths, in steps of text and in those with tokens of pictures."""
    text = MoeSpec(**MOE, correction_bias=True)
    pictures = dataclasses.replace(text, intermediate_size=256)
    mixture = dataclasses.replace(text, shared=DenseSpec(24), vision=pictures)
    whole, state = made([attention(0)], mlps=(mixture,), architecture="Ernie4_5_VLMoeForConditionalGeneration")
    specs = parts(whole.spec, 2, whole_experts=whole_experts)
    held = [(spec.mlps[0].vision.intermediate_size, spec.mlps[0].vision.num_held) for spec in specs]
    assert held == ([(256, 2), (256, 3)] if whole_experts else [(128, 5)] * 2)
    assert "experts of pictures of a rank" in [name for name, _, _ in describe(specs[1])]
    same_on_ranks(whole, state, specs)
    x, tokens = torch.randn(7, whole.spec.hidden_size), torch.tensor([0, 2, 3])
    kinds = TokenKinds(torch.tensor([1, 4, 5, 6]), tokens)
    expected = whole.layers[0].mlp(x, kinds)
    alone = whole.layers[0].mlp(x)
    assert not torch.equal(expected[tokens], alone[tokens])
    torch.testing.assert_close(expected[kinds.text], alone[kinds.text])

    def run(group: Any) -> torch.Tensor:
        model = registry.build(specs[group.rank], "float32", "cpu", group)
        copy_weights(model, state)
        return group.all_reduce(model.layers[0].mlp(x, kinds))

    for found in on_ranks(2, run):
        torch.testing.assert_close(found, expected)


def test_an_mla_layer_has_its_latent_on_every_rank() -> None:
    _, whole = pair("deepseek-v2")
    specs = parts(whole.spec, 4)
    for spec in specs:
        assert (spec.layers[0].num_heads, spec.layers[0].num_kv_heads) == (1, 1)
        assert spec.layers[0].row_width == whole.spec.layers[0].row_width
    same_on_ranks(whole, pair("deepseek-v2")[0].state_dict(), specs, steps=3)


def test_what_a_rank_holds_is_described() -> None:
    _, whole = pair("mimo")
    lines = {name: (value, reason) for name, value, reason in describe(parts(whole.spec, 4)[0])}
    assert lines["experts of a rank"][0] == "2 of 8, whole"
    assert lines["token embedding of a rank"][0] == "all"
    heads = [(value, reason) for name, value, reason in describe(parts(whole.spec, 4)[0]) if name == "heads of a rank"]
    assert ("3 of 12", "1 of 2 KV heads, each on 2 ranks") in heads
    assert ("3 of 12", "1 of 4 KV heads, each on one rank") in heads
    assert describe(whole.spec) == []


def test_a_norm_over_all_heads_has_its_cut_and_its_sum() -> None:
    """Channels of a KV head that is on two ranks count once."""
    for name, copies in (("olmo2", 1), ("olmo2-biases", 2)):
        _, whole = pair(name)
        spec = parts(whole.spec, 2)[1]
        model = registry.build(spec, "float32", "meta")
        norms = model.layers[0].self_attn
        widths = whole.spec.layers[0].q_size, whole.spec.layers[0].k_size
        assert (norms.q_norm.of, norms.k_norm.of) == widths and (norms.q_norm.copies, norms.k_norm.copies) == (1, copies)
        assert num_sums(model) == 3 * 3 + spec.shard.cut_embedding


class Uncut(DecoderAttention):
    """Has a projection that ranks split, of which no table says how."""

    def __init__(self, model: ModelSpec, spec: AttentionSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(model, spec, dtype, device)
        self.head_gate = Linear(model.hidden_size, spec.num_heads, dtype=dtype, device=device)


def test_a_projection_without_a_cut_is_refused_by_name() -> None:
    class Layer(DecoderLayer):
        attention_class = Uncut

    class Family(Decoder):
        layer_class = Layer

    spec = model_spec([attention(0)])
    (rank, *_) = parts(spec, 2)
    assert rank.shard is not None
    whole, part = (Family(one, torch.float32, "meta") for one in (spec, rank))
    with pytest.raises(
        ConfigError,
        match=r"layers\.0\.self_attn\.head_gate\.weight cannot be split over 2 ranks: .*no cut of \[12, 24\]",
    ) as caught:
        checked_cuts(whole, part, rank.shard)
    assert caught.value.param == "tensor_parallel_size"
