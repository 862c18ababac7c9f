"""A loaded foreign model looked at once more, with values: that tokens meet in attention and nowhere else.

Short passes with attention taken out, so that each token's way through the model is its own. They hold for models
that nobody here has ever seen, code from a checkpoint among them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from headrace.models.fallback.layout import TRANSFORMERS, TRANSFORMERS_OUT
from headrace.models.fallback.refusal import Refusal
from headrace.models.fallback.transformers import Attend, TransformersModel
from headrace.spec import AttentionSpec

TOKENS = 8
_POISONED = 3
_POSITION = 11
_NEAR = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Relative difference that rounding makes of equal tokens; other dtypes: 5 %."""


@torch.inference_mode()
def verify(model: TransformersModel) -> None:
    """Raises Refusal if the model cannot compute a step's packed tokens; names the module."""
    _tokens_are_apart(model)
    _first_position(model)
    _positions_are_given(model)
    _attention_is_attention(model)


def _tokens_are_apart(model: TransformersModel) -> None:
    """One token is poisoned: it must not spread. Convolutions, recurrences and averages over a batch would spread it."""
    ids = torch.arange(TOKENS) % model.spec.num_tokens
    positions = torch.arange(TOKENS) % (TOKENS // 2)
    embedding = model.foreign.get_input_embeddings()
    poisoned: list[bool] = []

    def poison(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        poisoned.append(True)
        out = out.clone()
        out.view(TOKENS, -1)[_POISONED] = torch.nan
        return out

    handle = embedding.register_forward_hook(poison)
    try:
        with _spreading(model) as spread, model.calls.through(own_values(model)):
            hidden = run(model, ids, positions)
    finally:
        handle.remove()
    if not poisoned:
        raise Refusal("it does not use its input embedding, so nothing can be said about it")
    if _spread(hidden):
        path = spread[0] if spread else ""
        module = model.foreign.get_submodule(path)
        raise Refusal(f"a {type(module).__name__} mixes tokens of different sequences, without attention", path)


def _first_position(model: TransformersModel) -> None:
    """Finds out where the model itself puts a sequence's first token, and has positions begin there."""
    ids = torch.full((TOKENS,), min(5, model.spec.num_tokens - 1))
    expected = _everything(model, ids, None)
    paddings = [module.padding_idx for module in model.foreign.modules() if isinstance(module, nn.Embedding)]
    for first in dict.fromkeys([0, *(padding + 1 for padding in paddings if padding is not None)]):
        model.body.first_position = first
        found = _everything(model, ids, torch.arange(TOKENS))
        near = _NEAR.get(model.dtype, 0.05)
        if all(bool(((a - b).abs().amax() <= near * b.abs().amax()).item()) for a, b in zip(found, expected, strict=True)):
            return
    raise Refusal("where its tokens stand is not counted from 0, and not from behind a padding index either")


def _everything(model: TransformersModel, ids: torch.Tensor, positions: torch.Tensor | None) -> list[torch.Tensor]:
    """The queries and keys of all layers, and the hidden states."""
    seen: list[torch.Tensor] = []
    own = own_values(model)

    def note(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        seen.extend((q.float(), k.float()))
        return own(index, q, k, v, arguments)

    with model.calls.through(note):
        hidden = run(model, ids, positions)
    return [*seen, hidden.float()]


def _positions_are_given(model: TransformersModel) -> None:
    """Equal tokens at one position are equal everywhere: a model that counts places of the batch would tell them apart."""
    spec = model.spec
    near = _NEAR.get(model.dtype, 0.05)
    ids = torch.full((TOKENS,), min(5, spec.num_tokens - 1))
    positions = torch.full((TOKENS,), min(_POSITION, spec.max_position - 1))
    own = own_values(model)

    def compare(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        for name, tensor in (("queries", q), ("keys", k), ("values", v)):
            _equal_tokens(TRANSFORMERS.pack(tensor, name, f"layer {index}"), f"{name} of layer {index}", near)
        return own(index, q, k, v, arguments)

    with model.calls.through(compare):
        _equal_tokens(run(model, ids, positions), "hidden states", near)


def _equal_tokens(tensor: torch.Tensor, what: str, near: float) -> None:
    """``[T, ...]``"""
    rows = tensor.flatten(1).float()
    if bool(((rows - rows[:1]).abs().amax() > near * rows.abs().amax()).item()):
        raise Refusal(f"{what} depend on where in a batch a token stands: it does not go by position_ids")


def _attention_is_attention(model: TransformersModel) -> None:
    """The model's own attention function, for each kind of layer, computes what the layer's spec says."""
    asked: dict[int, dict[str, Any]] = {}
    own = own_values(model)

    def note(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        asked[index] = arguments
        return own(index, q, k, v, arguments)

    with model.calls.through(note):
        run(model, torch.zeros(TOKENS, dtype=torch.int64), torch.arange(TOKENS))
    kinds: set[tuple[Any, ...]] = set()
    for index, (module, spec) in enumerate(zip(model.calls.modules, model.spec.layers, strict=True)):
        function = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        kind = (type(module), function, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim, spec.soft_cap)
        if function is None or kind in kinds:
            continue
        kinds.add(kind)
        _same_attention(model, module, function, spec, asked[index])


def _same_attention(
    model: TransformersModel, module: nn.Module, function: Callable[..., Any], spec: AttentionSpec, arguments: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(0)
    device, dtype = next(model.foreign.parameters()).device, model.dtype

    def draw(heads: int, width: int) -> torch.Tensor:
        return torch.randn(1, heads, TOKENS, width, generator=generator).to(device, dtype)

    q, k, v = (
        draw(spec.num_heads, spec.head_dim),
        draw(spec.num_kv_heads, spec.head_dim),
        draw(spec.num_kv_heads, spec.v_head_dim),
    )
    mask = torch.full((TOKENS, TOKENS), torch.finfo(dtype).min, dtype=dtype, device=device).triu(1)[None, None]
    try:
        out = function(module, q, k, v, mask, **{"scaling": spec.scale, "dropout": 0.0} | arguments)[0]
    except Exception:
        # Its signature is its own; that tokens attend as they should is then for a parity report to show.
        return
    expected = _attention(q[0].float(), k[0].float(), v[0].float(), spec, arguments.get("s_aux"))
    error = (out[0].float().transpose(0, 1) - expected).abs().amax()
    if bool((error > _NEAR.get(dtype, 0.05) * expected.abs().amax()).item()):
        raise Refusal(
            f"the attention of a {type(module).__name__} is not the softmax of scaled products over what a token sees "
            f"(off by {float(error):.2g})",
            f"layer {spec.layer}",
        )


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, sinks: torch.Tensor | None
) -> torch.Tensor:
    """``[heads, T, width]`` each, causal, by the formula."""
    k, v = (x.repeat_interleave(spec.group_size, dim=0) for x in (k, v))
    logits = spec.scale * q @ k.transpose(1, 2)
    if spec.soft_cap is not None:
        logits = spec.soft_cap * torch.tanh(logits / spec.soft_cap)
    logits = logits + torch.full_like(logits[0], -torch.inf).triu(1)
    if sinks is not None:
        logits = torch.cat((logits, sinks.float().view(-1, 1, 1).expand(-1, TOKENS, 1)), dim=-1)
    return logits.softmax(-1)[..., :TOKENS] @ v


def own_values(model: TransformersModel) -> Attend:
    """In place of attention: a token gets its own value, and nothing else."""
    layers = model.spec.layers

    def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        values = TRANSFORMERS.pack(v, "v", f"layer {index}").repeat_interleave(layers[index].group_size, dim=1)
        # What spoils a token's query or key spoils its result.
        spoilt = sum(0.0 * TRANSFORMERS.pack(x, "q", "").sum(dim=(1, 2), keepdim=True) for x in (q, k))
        return TRANSFORMERS_OUT.unpack(values + spoilt)

    return attend


def run(model: TransformersModel, ids: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """A pass of all layers over ids and positions ``[T]``: the hidden states ``[T, hidden]``."""
    device = next(model.foreign.parameters()).device
    with model.calls.in_order():
        return model.body.hidden(ids.to(device)[None], None if positions is None else positions.to(device)[None])[0]


@contextmanager
def _spreading(model: TransformersModel) -> Iterator[list[str]]:
    """Collects the path of the first module to finish whose result has the poison in other tokens than what it was given."""
    found: list[str] = []

    def hook(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, args: Any, out: Any) -> None:
            if not found and _spreads(out) and not any(map(_spreads, args)):
                found.append(path)

        return look

    handles = [module.register_forward_hook(hook(path)) for path, module in model.foreign.named_modules()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _spreads(value: Any) -> bool:
    """Of what a module takes or returns: whether it is a step's tokens, more than the poisoned one of them poisoned."""
    tensor = value[0] if isinstance(value, (tuple, list)) and value else value
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        return False
    rows = tensor[0] if tensor.dim() > 2 and tensor.shape[0] == 1 else tensor
    return rows.dim() > 1 and rows.shape[0] == TOKENS and _spread(rows)


def _spread(rows: torch.Tensor) -> bool:
    """Whether any token but the poisoned one has the poison. ``rows``: ``[T, ...]``."""
    broken = rows.isnan().flatten(1).any(1)
    broken[_POISONED] = False
    return bool(broken.any().item())
