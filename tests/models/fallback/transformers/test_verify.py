"""Models that nobody here has ever seen: what is found out about them before they are served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import tiny_models
from support.models.architectures import quiet
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from headrace import LLM
from headrace.config import Decision
from headrace.model_spec import ForeignSpec
from headrace.models.fallback.refusal import Unfit
from headrace.models.fallback.transformers.model import ATTENTION, TransformersModel
from headrace.models.fallback.transformers.trace import WITH_MASKS, trace
from headrace.models.fallback.transformers.verify import TOKENS, _differ, _others_differ, verify

CONFIG = LlamaConfig(
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=2,
    intermediate_size=16,
    vocab_size=97,
    max_position_embeddings=64,
)


class Hashed(LlamaForCausalLM):
    """Adds something to its embedding that is made of ids."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.table = nn.Embedding(97, 32)
        self.model.forward = self.whole
        self.post_init()

    def whole(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None, **arguments: Any) -> Any:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        arguments.pop("inputs_embeds", None)
        embedded = self.added(self.model.embed_tokens(input_ids), input_ids, position_ids)
        return type(self.model).forward(self.model, inputs_embeds=embedded, position_ids=position_ids, **arguments)

    def added(self, embedded: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        """Adds an embedding of the token's own id."""
        return embedded + self.model.table(ids * 31 % 97)


class Bigrams(Hashed):
    def added(self, embedded: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        return embedded + 0.5 * torch.sin((ids * 31 + ids.roll(1, 1) * 17).to(embedded.dtype))[..., None]


class Tabled(Hashed):
    """Bigrams of one sequence alone, looked up in a table."""

    def added(self, embedded: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        return embedded + self.model.table((ids * 31 + torch.where(positions > 0, ids.roll(1, 1), 0) * 17) % 97)


class Shifted(Hashed):
    """Mixes embeddings, of one sequence alone."""

    def added(self, embedded: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        return embedded + torch.where(positions[..., None] > 0, embedded.roll(1, 1), 0.0)


class Counted(Hashed):
    """Goes by places in the batch, whatever positions it is given."""

    def whole(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None, **arguments: Any) -> Any:
        return super().whole(input_ids, None, **arguments)


def looked_at(kind: type[LlamaForCausalLM]) -> tuple[Decision, ...]:
    """Observed without weights, then with random ones."""
    build: Any = kind._from_config
    with torch.device("meta"):
        bare = build(CONFIG, attn_implementation=WITH_MASKS, dtype=torch.float32).train(False)
    seen = trace(bare)
    torch.manual_seed(0)
    foreign = build(CONFIG, attn_implementation=ATTENTION, dtype=torch.float32).train(False)
    spec = ForeignSpec(
        architecture=kind.__name__,
        vocab_size=seen.vocab_size,
        hidden_size=seen.hidden_size,
        layers=tuple(call.spec for call in seen.calls),
        max_position=64,
        dtype="float32",
        num_tokens=97,
        num_weights=sum(parameter.numel() for parameter in foreign.parameters()),
    )
    return verify(TransformersModel(spec, foreign, seen), spec.max_position)


def softmax(
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    bias: Any = None,
    slope: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function with biases on its logits, under a name of its own."""
    groups = q.shape[1] // k.shape[1]
    places = torch.arange(q.shape[2])
    weights = q @ k.repeat_interleave(groups, 1).transpose(2, 3) * scaling + mask
    weights = weights - slope * (places[:, None] - places).abs()
    if isinstance(bias, torch.Tensor):
        weights = weights + bias
    return (weights.softmax(-1) @ v.repeat_interleave(groups, 1)).transpose(1, 2), None


def sloping(*args: Any, **arguments: Any) -> tuple[torch.Tensor, None]:
    return softmax(*args, **arguments | {"slope": 0.5})


def sloping_later(module: nn.Module, *args: Any, **arguments: Any) -> tuple[torch.Tensor, None]:
    """Attends with a slope in the last layer alone."""
    return softmax(module, *args, **arguments | {"slope": 0.5 * float(module.layer_idx == 1)})


def broken(module: nn.Module, *args: Any, **arguments: Any) -> tuple[torch.Tensor, None]:
    """One NaN, in the last layer."""
    out, _ = softmax(module, *args, **arguments)
    out[..., -1, -1, -1] += torch.nan if module.layer_idx == 1 else 0.0
    return out, None


def failing(*_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    raise NotImplementedError("no such thing")


def llama(function: Callable[..., Any] | None, **given: Any) -> type[LlamaForCausalLM]:
    """Makes a model with attention that gives the interface more than others do. None: it says of no function that it is its
    own."""

    class Attention(modeling_llama.LlamaAttention):
        def forward(self, hidden_states: Any, position_embeddings: Any, attention_mask: Any = None, **_: Any) -> Any:
            shape = (*hidden_states.shape[:-1], -1, self.head_dim)
            q, k, v = (x(hidden_states).view(shape).transpose(1, 2) for x in (self.q_proj, self.k_proj, self.v_proj))
            q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
            name = self.config._attn_implementation
            attend = (
                ALL_ATTENTION_FUNCTIONS[name] if function is None else ALL_ATTENTION_FUNCTIONS.get_interface(name, function)
            )
            out, _ = attend(self, q, k, v, attention_mask, scaling=self.scaling, dropout=0.0, **given)
            return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None

    class Own(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            for index, layer in enumerate(self.model.layers):
                layer.self_attn = Attention(config, index)
            self.post_init()

    return Own


@pytest.mark.parametrize("value", [torch.zeros(1), [torch.zeros(1)], {"of": (torch.zeros(1),)}], ids=["bare", "list", "dict"])
@pytest.mark.parametrize("function", [softmax, None])
def test_a_tensor_that_nobody_knows_is_refused(value: Any, function: Callable[..., Any] | None) -> None:
    with pytest.raises(Unfit, match=r"model\.layers\.0\.self_attn: its attention takes bias, to which") as caught:
        looked_at(llama(function, bias=value))
    assert caught.value.path == "model.layers.0.self_attn"


def test_attention_of_the_own_name_is_compared() -> None:
    assert looked_at(llama(softmax)) == ()
    assert looked_at(llama(softmax, slope=0.0, of_no_use="x")) == ()
    with pytest.raises(Unfit, match="layer 0: the attention of a Attention is not the softmax"):
        looked_at(llama(sloping))
    with pytest.raises(Unfit, match="layer 0: the attention of a Attention is not the softmax"):
        looked_at(llama(softmax, slope=0.5))


def test_each_layer_is_compared() -> None:
    with pytest.raises(Unfit, match="layer 1: the attention of a Attention is not the softmax"):
        looked_at(llama(sloping_later))


def test_nan_is_a_difference() -> None:
    with pytest.raises(Unfit, match=r"layer 1: the attention of a Attention is not the softmax .*\(off by nan\)"):
        looked_at(llama(broken))
    one, nan = torch.ones(TOKENS, 2), torch.ones(TOKENS, 2)
    nan[3, 1] = torch.nan
    for a, b in ((one, nan), (nan, one), (nan, nan)):
        assert _differ(a, b, torch.float32) and _others_differ(a, b, 0, torch.float32)
    assert not _differ(one, one, torch.float32)


@pytest.mark.parametrize(
    ("function", "why"),
    [(failing, "failing of Attention fails: NotImplementedError: no such thing"), (None, "has no attention function")],
)
def test_what_cannot_be_compared_is_said(function: Callable[..., Any] | None, why: str) -> None:
    (decision,) = looked_at(llama(function, output_attentions=False, position_ids=torch.zeros(1)))
    assert (decision.name, decision.value) == ("attention not compared", "layers 0, 1")
    assert why in decision.reason
    with pytest.raises(Unfit, match="layer 0: the attention of a Attention takes slope, which headrace's does not know"):
        looked_at(llama(function, slope=0.5))


def test_the_report_has_what_could_not_be_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with quiet():
        tiny_models.save(tiny_models.model("llama"), tmp_path)
        monkeypatch.setattr(modeling_llama, "eager_attention_forward", failing)
        llm = LLM(
            model=str(tmp_path),
            model_impl="transformers",
            skip_tokenizer_init=True,
            device="cpu",
            dtype="float32",
            num_kv_blocks=40,
            max_model_len=64,
            num_threads=1,
        )
    said = {line.name: line for line in llm.info.decisions}
    assert said["attention not compared"].value == "layers 0, 1, 2"
    assert "failing of LlamaAttention fails" in said["attention not compared"].reason


def test_what_is_made_of_a_tokens_own_id_is_fine() -> None:
    assert looked_at(Hashed) == ()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Bigrams, r"model: what a LlamaModel gives rotary_emb for a token depends on the ids of other tokens"),
        (Tabled, "model: what a LlamaModel gives table for a token depends on the ids of other tokens"),
        (Shifted, "mixes tokens of different sequences, without attention"),
        (Counted, "queries of layer 0 depend on where in a batch a token stands: it does not go by position_ids"),
    ],
)
def test_models_that_mix_tokens_or_count_them_are_refused(kind: type[LlamaForCausalLM], why: str) -> None:
    with pytest.raises(Unfit, match=why):
        looked_at(kind)
