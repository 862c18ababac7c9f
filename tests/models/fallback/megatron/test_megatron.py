"""Megatron-core models on headrace's attention: as eager attention has them, as Megatron has them, and left as they were."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from support.models import megatron
from support.models.megatron_engine import (
    OWN,
    PROMPTS,
    SHARED,
    Reference,
    assert_same,
    assert_same_every_way,
    eager,
    engine,
    state_of,
    tokens_of,
    train_step,
)

from headrace import LLM, SamplingParams
from headrace.errors import ConfigError, EngineError
from headrace.model_spec import ForeignSpec
from headrace.models.fallback.foreign_model import ForeignModel
from headrace.models.fallback.megatron.model import MegatronModel
from headrace.models.interface import ModelInputs
from headrace.weights.update import WholeUpdate

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'headrace[megatron]'")
pytestmark = pytest.mark.filterwarnings("ignore")


EAGER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grouped queries": ({}, {}),
    "a head each": ({"num_query_groups": 4}, {}),
    "QK-norm": ({"qk_layernorm": True, "spec": {"qk_layernorm": True}}, {}),
    "layer norm, biases, tied": (
        {"add_bias_linear": True, "add_qkv_bias": True, "model": {"share_embeddings_and_output_weights": True}},
        {},
    ),
    "heads of another width": ({"kv_channels": 16}, {"channels": 16}),
    "half of the channels": ({"model": {"rotary_percent": 0.5}}, {"channels": 4}),
    "another base": ({"model": {"rotary_base": 500}}, {"base": 500.0}),
    "interleaved": ({"rotary_interleaved": True}, {"interleaved": True}),
    "learned positions": ({"model": {"position_embedding_type": "learned_absolute"}}, {"channels": 0}),
    "no positions": ({"model": {"position_embedding_type": "none"}}, {"channels": 0}),
    "a window": ({"window_size": (5, 0)}, {"window": 6}),
    "scaled by layer": ({"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True}, {}),
}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.slow) if kind in OWN else kind for kind in EAGER])
def test_as_the_same_modules_with_eager_attention(kind: str) -> None:
    config, rotary = EAGER[kind]
    model = megatron.gpt(**config)
    # Blocks behind a window are given back: it takes fewer to run short of them.
    blocks = 24 if "window" not in rotary else 8
    assert_same_every_way(engine(model, num_kv_blocks=blocks), eager(model, **rotary))


@pytest.mark.parametrize("kind", OWN)
def test_as_megatron_itself(kind: str) -> None:
    """Its own forward pass, which asks for a CUDA device in places that would do on any."""
    with megatron.no_device_asked_for():
        model = megatron.gpt(**OWN[kind])
        llm = engine(model)
        assert_same_every_way(llm, lambda tokens: megatron.own_logprobs(model, tokens))
    mla = [line.value for line in llm.info.decisions if line.name == "latent attention"]
    assert mla == (["uncompressed"] if "latent" in kind else [])


# Layer numbers


def renumber(model: Any, numbers: Sequence[int]) -> None:
    for layer, number in zip(model.decoder.layers, numbers, strict=True):
        layer.layer_number = layer.self_attention.layer_number = number


@pytest.mark.parametrize("first", [2, pytest.param(17, marks=pytest.mark.slow)])
def test_layers_may_be_numbered_from_anywhere(first: int) -> None:
    model = megatron.gpt()
    renumber(model, range(first, first + 3))
    llm = engine(model)
    assert [layer.layer for layer in llm.info.layers] == [0, 1, 2]
    assert_same(llm, eager(model))


@pytest.mark.parametrize("empty", [0, 1])
def test_layers_that_do_not_attend_are_not_counted(empty: int) -> None:
    """As empty layers at the head of a pipeline: the others' numbers begin behind them."""
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

    model = megatron.gpt()
    layer = model.decoder.layers[empty]
    layer.input_layernorm, layer.self_attention, layer.self_attn_bda = IdentityOp(), IdentityOp(), IdentityFuncOp()
    llm = engine(model)
    assert [one.layer for one in llm.info.layers] == [0, 1]
    assert_same(llm, eager(model))


@pytest.mark.parametrize("numbers", [[1, 2, 2], [1, 3, 4], [3, 2, 1], [2, 1, 3]])
def test_wrong_numbers_raise(numbers: list[int]) -> None:
    model = megatron.gpt()
    renumber(model, numbers)
    with pytest.raises(ValueError, match="layer numbers must be consecutive"):
        engine(model)


# The trainer's model


def test_a_trainer_step_is_seen_by_the_next_rollout() -> None:
    """Nothing is converted, and nothing computed with the old weights is used again."""
    model = megatron.gpt()
    llm = engine(model)
    prompt = [*SHARED, 1, 2, 3, 4]
    assert_same(llm, eager(model), [prompt])
    first = tokens_of(llm, prompt, 12)
    hits = llm.stats.prefix_hit_tokens
    assert hits > 0
    model.train()
    train_step(model)
    assert_same(llm, eager_in_eval_mode(model), [prompt])
    assert llm.stats.prefix_hit_tokens == hits, "cached KV of the old weights was used"
    assert tokens_of(llm, prompt, 12) != first
    assert llm.stats.prefix_hit_tokens > hits, "the new weights' KV is cached in turn"


@pytest.mark.parametrize("kind", ["latent with experts"])
def test_a_rollout_leaves_nothing_behind_that_training_meets(kind: str) -> None:
    """No buffer is written, and no tensor of inference mode is kept: steps of a trainer go as they would have gone."""
    trained = []
    for rolls_out in (False, True):
        with megatron.no_device_asked_for():
            model = megatron.gpt(hidden_dropout=0.0, attention_dropout=0.0, **OWN[kind]).train()
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            if rolls_out:
                llm = engine(model)
                tokens_of(llm, PROMPTS[0])
            assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
            train_step(model, rate=0.01)
            if rolls_out:
                tokens_of(llm, PROMPTS[0])
            train_step(model, rate=0.01)
        trained.append([parameter.detach().clone() for parameter in model.parameters()])
    for without, after in zip(*trained, strict=True):
        torch.testing.assert_close(after, without)


@pytest.mark.parametrize(
    "how", ["data", "in place", "new memory", "one bit", "rows turned", "columns turned", "two changed places"]
)
def test_weights_written_in_any_way_are_noticed(how: str) -> None:
    model = megatron.gpt()
    llm = engine(model)
    prompt = [*SHARED, 1, 2, 3, 4]
    tokens_of(llm, prompt)
    weight = model.decoder.layers[0].self_attention.linear_qkv.weight
    hits = llm.stats.prefix_hit_tokens
    if how == "data":
        weight.data.mul_(-1)
    elif how == "in place":
        with torch.no_grad():
            weight.mul_(-1)
    elif how == "new memory":
        weight.data = -weight.data
    elif how == "rows turned":
        weight.data.copy_(weight.data.flip(0))
    elif how == "columns turned":
        weight.data.copy_(weight.data.flip(1))
    elif how == "two changed places":
        weight.data[[1, 5], [2, 7]] = weight.data[[5, 1], [7, 2]]
    else:
        weight.data.view(-1).view(torch.int32)[7] ^= 1
    assert_same(llm, eager(model), [prompt])
    assert llm.stats.prefix_hit_tokens == hits


def test_weights_that_stay_keep_the_cache_unless_told_otherwise() -> None:
    llm = engine(megatron.gpt())
    prompt = [*SHARED, 1, 2, 3, 4]
    expected = tokens_of(llm, prompt)
    assert tokens_of(llm, prompt) == expected
    hits = llm.stats.prefix_hit_tokens
    assert hits > 0
    llm.weights_changed()
    assert tokens_of(llm, prompt) == expected
    assert llm.stats.prefix_hit_tokens == hits


def test_the_model_stays_as_its_owner_left_it() -> None:
    """Also its modes, where some modules train and others do not; also during the engine's life, not only after it."""
    model = megatron.gpt()
    model.train()
    model.decoder.layers[1].mlp.train(False)
    model.decoder.layers[2].requires_grad_(False)
    before = state_of(model)
    with engine(model) as llm:
        assert state_of(model) == before
        tokens = tokens_of(llm, PROMPTS[0])
        assert state_of(model) == before
        assert_same(llm, eager_in_eval_mode(model))
    assert state_of(model) == before
    model.train(False)
    assert tokens_of(engine(model), PROMPTS[0]) == tokens
    train_step(model.train())


def eager_in_eval_mode(model: Any) -> Reference:
    def reference(tokens: Sequence[int]) -> torch.Tensor:
        modes = [(module, module.training) for module in model.modules()]
        model.train(False)
        try:
            return eager(model)(tokens)
        finally:
            for module, mode in modes:
                module.training = mode

    return reference


def test_the_model_is_given_back_when_a_step_fails() -> None:
    model = megatron.gpt().train()
    llm = engine(model)
    before = state_of(model)
    failing = mock.patch.object(type(model.decoder.layers[1].mlp), "forward", side_effect=RuntimeError("no memory"))
    with failing, pytest.raises(EngineError, match="no memory"):
        tokens_of(llm, [4, 5])
    assert state_of(model) == before


def test_a_closed_engine_lets_go_of_the_model() -> None:
    import gc
    import weakref

    model = megatron.gpt()
    held = weakref.ref(model)
    llm = engine(model)
    tokens_of(llm, [4, 5])
    llm.close()
    del model
    gc.collect()
    assert held() is None


def test_what_trainers_wrap_a_model_in_is_taken_off() -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self, module: Any) -> None:
            super().__init__()
            self.module = module

    model = megatron.gpt()
    expected = tokens_of(engine(model), PROMPTS[0])
    wrapped = LLM.from_megatron([Wrapper(Wrapper(model))], num_kv_blocks=24, max_model_len=64)
    assert tokens_of(wrapped, PROMPTS[0]) == expected


# Vocabulary and tokenizer


def test_columns_that_pad_the_vocabulary_are_never_drawn() -> None:
    model = megatron.gpt()
    model.output_layer.weight.data[80:] = 30 * model.output_layer.weight.data[:16].abs()
    llm = engine(model, vocab_size=80)
    params = SamplingParams(temperature=2.0, max_tokens=40, ignore_eos=True, logprobs=20, seed=3)
    (out,) = llm.generate({"prompt_token_ids": [5, 6]}, params)[0].outputs
    assert max(out.token_ids) < 80
    assert all(entry.logprob == -math.inf for step in out.logprobs for token, entry in step.items() if token >= 80)
    unpadded = engine(model).generate({"prompt_token_ids": [5, 6]}, params)[0].outputs[0]
    assert max(unpadded.token_ids) >= 80, "the columns would have been drawn"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: 88 - 1]
    backend = Tokenizer(models.BPE({"<end>": 0, **{piece: i + 1 for i, piece in enumerate(alphabet)}}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"
    )


@pytest.mark.slow
def test_a_tokenizer_as_an_object_or_a_directory(tokenizer: Any, tmp_path: Any) -> None:
    model = megatron.gpt()
    tokenizer.save_pretrained(tmp_path)

    class Megatrons:
        def __init__(self) -> None:
            self._tokenizer = tokenizer

    texts = set()
    params = SamplingParams(temperature=0.0, max_tokens=5)
    for given in (tokenizer, Megatrons(), str(tmp_path)):
        llm = engine(model, tokenizer=given)
        (output,) = llm.generate("BAD", params)
        assert llm._engine.executor.model.spec.num_tokens == 88
        texts.add(output.outputs[0].text)
        chats = [
            llm.chat([{"role": "user", "content": "BAD"}], params, chat_template=t)
            for t in (None, "A{{ messages[0].content }}")
        ]
        assert chats[0][0].outputs[0].text == output.outputs[0].text
        assert chats[1][0].prompt == "ABAD"
    assert len(texts) == 1


def test_all_weights_are_updated_at_once() -> None:
    """In the trainer's own tensors; what was cached of the old ones is not used again."""
    model, other = megatron.gpt(add_qkv_bias=True), megatron.gpt(add_qkv_bias=True, seed=1)
    llm = engine(model)
    prompt = [*SHARED, 1, 2, 3, 4]
    tokens_of(llm, prompt)
    places, hits = [parameter.data_ptr() for parameter in model.parameters()], llm.stats.prefix_hit_tokens
    assert llm.update_weights(other.named_parameters()) == len(places)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert_same(llm, eager(other), [prompt])
    assert llm.stats.prefix_hit_tokens == hits


def test_what_chooses_experts_is_updated_too() -> None:
    """It is a buffer, which the trainer moves between its steps."""
    with megatron.no_device_asked_for():
        model = megatron.gpt(**OWN["experts with a bias"])
    name = "decoder.layers.1.mlp.router.expert_bias"
    value = torch.tensor([1.0, -2.0, 3.0, -4.0])
    ours = ForeignModel(ForeignSpec.__new__(ForeignSpec), torch.float32)
    ours.__dict__["foreign"] = model
    assert WholeUpdate(ours.update_plan, {name: value}).write() == 1
    assert torch.equal(model.get_buffer(name), value)


def test_weights_are_updated_under_megatrons_names() -> None:
    model = megatron.gpt()
    llm = engine(model)
    ours = llm._engine.executor.model
    assert isinstance(ours, MegatronModel)
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    assert name in dict(ours.name_table().items())
    value = torch.full_like(model.get_parameter(name), 0.25)
    assert llm.update_weights({name: value}) == 1
    assert torch.equal(model.get_parameter(name), value)
    assert_same(llm, eager(model), PROMPTS[:2])
    with pytest.raises(ConfigError, match="has no weight"):
        llm.update_weights({"decoder.layers.9.mlp.linear_fc2.weight": value})
    with pytest.raises(ConfigError, match="has the shape"):
        llm.update_weights({name: value[:1]})


# One call of a layer


def core_of(llm: LLM, index: int = 0) -> Any:
    cores = [ours for _, name, ours in llm._engine.executor.model._replacements if name == "core_attention"]
    return cores[index]


def test_a_layers_calls_are_checked() -> None:
    llm = engine(megatron.gpt())
    core, second = core_of(llm), core_of(llm, 1)
    q, kv = torch.zeros(3, 1, 4, 8), torch.zeros(3, 1, 2, 8)
    turn = core._turn
    for arguments, match in (
        ({"attention_bias": q}, "layer 0: attention_bias cannot be given"),
        ({"packed_seq_params": object()}, "layer 0: packed_seq_params cannot be given"),
        ({"attention_mask": q}, "layer 0: attention_mask cannot be given"),
    ):
        with pytest.raises(ValueError, match=match), turn.all():
            core(q, kv, kv, **arguments)
    with pytest.raises(ValueError, match="outside a step"), turn.all():
        core(q, kv, kv)
    with pytest.raises(ValueError, match="layer 1 called core_attention when it was the turn of layer 0"), turn.all():
        second(q, kv, kv)
    with pytest.raises(ValueError, match="0 of 3 layers called core_attention"), turn.all():
        pass


@pytest.mark.parametrize(
    ("q", "k", "match"),
    [
        ((3, 2, 4, 8), (3, 2, 2, 8), "q has a batch of 2"),
        ((3, 4, 8), (3, 2, 8), "q has 3 dimensions"),
        ((3, 1, 4, 8), (3, 1, 4, 8), "k has 3 tokens of 4 heads"),
        ((3, 1, 2, 8), (3, 1, 2, 8), "q has 3 tokens of 2 heads"),
    ],
)
def test_shapes_that_are_not_the_layers_raise(q: tuple[int, ...], k: tuple[int, ...], match: str) -> None:
    llm = engine(megatron.gpt())
    ours = llm._engine.executor.model
    context: Any = mock.MagicMock()
    with pytest.raises(ValueError, match=match), ours.cell.holding(context), ours._turn.all():
        core_of(llm)(torch.zeros(q), torch.zeros(k), torch.zeros(k))
    with pytest.raises(ValueError, match="k is missing"), ours.cell.holding(context), ours._turn.all():
        core_of(llm)(torch.zeros(3, 1, 4, 8), None, None)


def test_no_tokens_at_all() -> None:
    ours = engine(megatron.gpt())._engine.executor.model
    empty = torch.empty(0, dtype=torch.int64)
    context: Any = type("Context", (), {"caches": [None] * 3})()
    assert ours(ModelInputs(empty, empty), context).shape == (0, 32)
    logits = ours.logits(torch.empty(0, 32, dtype=torch.bfloat16))
    assert (logits.shape, logits.dtype) == ((0, megatron.VOCAB), torch.float32)


def test_bfloat16_follows_the_model() -> None:
    llm = engine(megatron.gpt(dtype=torch.bfloat16, bf16=True))
    assert llm.info.dtype == "bfloat16"
    assert len(tokens_of(llm, PROMPTS[0])) == 8
