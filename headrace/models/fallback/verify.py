"""A loaded foreign model looked at once more, with values: that tokens meet in attention and nowhere else.

Short passes with attention taken out, so that each token's way through the model is its own. They hold for models
that nobody here has ever seen, code from a checkpoint among them.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from headrace.config import Decision
from headrace.models.fallback.layout import TRANSFORMERS, TRANSFORMERS_OUT
from headrace.models.fallback.observe import KNOWN
from headrace.models.fallback.refusal import Refusal
from headrace.models.fallback.rewritten import forward_of
from headrace.models.fallback.transformers import Attend, TransformersModel
from headrace.spec import AttentionSpec

TOKENS = 8
_POISONED = 1
"""Neither the first nor the last of its sequence: a model may go by positions and stop at a sequence's ends."""
_CHANGED = (1, 5, 2)
"""Whose ids are changed, one after another while other tokens notice: rounding alone may send one to another expert."""
_GIVEN, _MADE = "given", "made"
_POSITION = 11
_NEAR = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Relative difference that rounding makes of equal tokens; other dtypes: 5 %."""

_DEFAULTS = threading.Lock()
"""Models may be loaded side by side."""


@torch.inference_mode()
def verify(model: TransformersModel, longest: int) -> tuple[Decision, ...]:
    """What could not be looked at, and why.

    Args:
        longest: tokens that a sequence may have.

    Raises:
        Refusal: the model cannot compute a step's packed tokens; names the module.
    """
    _tokens_are_apart(model)
    _first_position(model)
    _positions_are_given(model)
    _positions_are_apart(model, longest)
    _ids_are_apart(model)
    _rewritten_as_they_were(model)
    return _attention_is_attention(model)


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
    try:
        expected = _everything(model, ids, None)
    except Exception:
        # It computes with the positions that it is given, as was just seen, and has none of its own to begin elsewhere.
        return
    paddings = [module.padding_idx for module in model.foreign.modules() if isinstance(module, nn.Embedding)]
    for first in dict.fromkeys([0, *(padding + 1 for padding in paddings if padding is not None)]):
        model.body.first_position = first
        found = _everything(model, ids, torch.arange(TOKENS))
        near = _NEAR.get(model.dtype, 0.05)
        if all(bool(((a - b).abs().amax() <= near * b.abs().amax()).item()) for a, b in zip(found, expected, strict=True)):
            return
    raise Refusal("where its tokens stand is not counted from 0, and not from behind a padding index either")


def _positions_are_apart(model: TransformersModel, longest: int) -> None:
    """One token is moved to the end of the context: no other may notice, or the longest sequence would change the others."""
    ids, positions = (3 + torch.arange(TOKENS)) % model.spec.num_tokens, torch.arange(TOKENS).clamp(max=longest - 1)
    expected, near = _everything(model, ids, positions), _NEAR.get(model.dtype, 0.05)
    for token in _CHANGED:
        moved = positions.clone()
        moved[token] = longest - 1
        found = _everything(model, ids, moved)
        noticed = [_others_differ(a, b, token, near) for a, b in zip(found, expected, strict=True)]
        if not bool(torch.stack(noticed).any().item()):
            return
    raise Refusal(
        f"what it computes for a token depends on how far others of the batch have come (one is at position {longest - 1}), as "
        "with rotary frequencies that are chosen by the longest sequence: a lower max_model_len may end before they change"
    )


def _everything(model: TransformersModel, ids: torch.Tensor, positions: torch.Tensor | None) -> list[torch.Tensor]:
    """The queries, keys and values of all layers, and the hidden states: ``[T, ...]`` each."""
    seen: list[torch.Tensor] = []
    own = own_values(model)

    def note(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        seen.extend(TRANSFORMERS.pack(tensor, "q, k or v", f"layer {index}").float() for tensor in (q, k, v))
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


def _ids_are_apart(model: TransformersModel) -> None:
    """One token's id is changed: no other token may notice. Hashes of neighbouring ids have no poison to spread."""
    count, positions = model.spec.num_tokens, torch.arange(TOKENS)
    ids = (3 + torch.arange(TOKENS)) % count
    expected = _everything(model, ids, positions)
    for token in _CHANGED:
        changed = ids.clone()
        changed[token] = (3 + TOKENS + token) % count
        found = _everything(model, changed, positions)
        near = _NEAR.get(model.dtype, 0.05)
        noticed = [_others_differ(a, b, token, near) for a, b in zip(found, expected, strict=True)]
        if not bool(torch.stack(noticed).any().item()):
            return
    with _rows_of_modules(model) as before:
        run(model, ids, positions)
    with _rows_of_modules(model) as after:
        run(model, changed, positions)
    for (path, way, a), (other, _, b) in zip(after, before, strict=False):
        if path == other and a.shape == b.shape and bool(_others_differ(a, b, token, near).item()):
            raise _noticed(model, path, way)
    raise Refusal("what it computes for a token depends on the ids of other tokens, without attention")


def _noticed(model: TransformersModel, path: str, way: str) -> Refusal:
    """Of the first module to which another token's id matters: what it makes is its own doing, what it is given its owner's."""
    what, owner = "makes", path
    if way == _GIVEN:
        owner = path.rpartition(".")[0]
        while isinstance(model.foreign.get_submodule(owner), nn.ModuleList):
            owner = owner.rpartition(".")[0]
        what = f"gives {path.removeprefix(owner + '.')}"
    kind = type(model.foreign.get_submodule(owner)).__name__
    return Refusal(f"what a {kind} {what} for a token depends on the ids of other tokens, without attention", owner)


def _others_differ(a: torch.Tensor, b: torch.Tensor, token: int, near: float) -> torch.Tensor:
    """Whether other rows than ``token`` do, ``[]`` bool. ``a``, ``b``: ``[T, ...]``."""
    others = [row for row in range(TOKENS) if row != token]
    return (a[others] - b[others]).abs().amax() > near * b.abs().amax()


@contextmanager
def _rows_of_modules(model: TransformersModel) -> Iterator[list[tuple[str, str, torch.Tensor]]]:
    """Collects what modules are given and make in one pass, as they do: (path, which of the two, ``[T, width]``)."""
    seen: list[tuple[str, str, torch.Tensor]] = []

    def note(path: str, way: str, values: Iterable[Any]) -> None:
        for tensor in values:
            if isinstance(tensor, torch.Tensor):
                rows = tensor[0] if tensor.dim() > 1 and tensor.shape[0] == 1 else tensor
                if rows.dim() and rows.shape[0] == TOKENS:
                    seen.append((path, way, rows.to(torch.float32, copy=True).reshape(TOKENS, -1)))

    def enter(path: str) -> Callable[..., None]:
        return lambda module, args, kwargs: note(path, _GIVEN, [*args, *kwargs.values()])

    def leave(path: str) -> Callable[..., None]:
        return lambda module, args, out: note(path, _MADE, out if isinstance(out, (tuple, list)) else [out])

    handles: list[Any] = []
    for path, module in model.foreign.named_modules():
        handles.append(module.register_forward_pre_hook(enter(path), with_kwargs=True))
        handles.append(module.register_forward_hook(leave(path)))
    try:
        with model.calls.through(own_values(model)):
            yield seen
    finally:
        for handle in handles:
            handle.remove()


def _rewritten_as_they_were(model: TransformersModel) -> None:
    """Forward passes that were written again, with attention by the formula, make what the modules' own make."""
    given: dict[nn.Module, dict[str, Any]] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
        given[module] = {name: value for name, value in named.items() if name not in ("self", "kwargs")} | named.get(
            "kwargs", {}
        )

    rewritten = [module for module in model.calls.modules if forward_of(module) is not None]
    if not rewritten:
        return
    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in rewritten]
    try:
        with model.calls.through(own_values(model)):
            run(model, torch.zeros(TOKENS, dtype=torch.int64), torch.arange(TOKENS))
    finally:
        for handle in handles:
            handle.remove()

    def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        spec = model.spec.layers[index]
        out = _attention(q[0].float(), k[0].float(), v[0].float(), spec, None, spec.window)
        return out.transpose(0, 1)[None].to(q.dtype)

    for index, module in enumerate(model.calls.modules):
        if module not in given:
            continue
        name, hidden = next(iter(given[module].items()))
        drawn = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(index)).to(hidden)
        arguments = given[module] | {name: drawn, "attention_mask": None}
        with model.calls.through(attend), model.calls.at(index):
            ours = module(**arguments)[0]
        mask = _causal(drawn.dtype, drawn.device)
        theirs = type(module).forward(module, **arguments | {"attention_mask": mask})[0]
        off = (ours - theirs).abs().amax().float()
        if bool((off > _NEAR.get(model.dtype, 0.05) * theirs.abs().amax()).item()):
            raise Refusal(
                f"a {type(module).__name__} is not what it is taken for: written again, it makes something else "
                f"(off by {float(off):.2g})",
                f"layer {index}",
            )


def _causal(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``[1, 1, T, T]``, to be added to logits."""
    return torch.full((TOKENS, TOKENS), torch.finfo(dtype).min, dtype=dtype, device=device).triu(1)[None, None]


def _attention_is_attention(model: TransformersModel) -> tuple[Decision, ...]:
    """The model's own attention function computes what the layer's spec says, in every layer.

    Returns:
        Which layers could not be compared, if any, and why.
    """
    asked: dict[int, dict[str, Any]] = {}
    functions: dict[int, Callable[..., Any] | None] = {}
    own = own_values(model)

    def note(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        asked[index] = arguments
        file = sys.modules[type(model.calls.modules[index]).__module__]
        functions[index] = defaults.pop() if defaults else getattr(file, "eager_attention_forward", None)
        defaults.clear()
        return own(index, q, k, v, arguments)

    with _defaults() as defaults, model.calls.through(note):
        run(model, torch.zeros(TOKENS, dtype=torch.int64), torch.arange(TOKENS))
    unknown: dict[str, list[int]] = {}
    for index, (module, spec) in enumerate(zip(model.calls.modules, model.spec.layers, strict=True)):
        if forward_of(module) is not None:
            continue
        why = _same_attention(model, module, functions[index], spec, asked[index])
        if why:
            _nothing_unknown(module, spec, asked[index], why)
            unknown.setdefault(why, []).append(index)
    return tuple(
        Decision(
            "attention not compared", f"layers {', '.join(map(str, layers))}", f"{why}: doctor --parity compares the model"
        )
        for why, layers in unknown.items()
    )


@contextmanager
def _defaults() -> Iterator[list[Callable[..., Any]]]:
    """Collects what models say is their attention when no other is asked for, whatever they call it."""
    found: list[Callable[..., Any]] = []
    theirs = AttentionInterface.get_interface

    def note(self: AttentionInterface, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        found.append(default)
        function: Callable[..., Any] = theirs(self, attn_implementation, default)
        return function

    with _DEFAULTS:
        AttentionInterface.get_interface = note  # type: ignore[method-assign]
        try:
            yield found
        finally:
            AttentionInterface.get_interface = theirs  # type: ignore[method-assign]


def _nothing_unknown(module: nn.Module, spec: AttentionSpec, arguments: dict[str, Any], why: str) -> None:
    """An argument that nobody here knows may be ignored only where the model's own attention function ignores it too."""
    for name, value in arguments.items():
        if name not in KNOWN and value is not None and not isinstance(value, bool):
            raise Refusal(
                f"the attention of a {type(module).__name__} takes {name}, which headrace's does not know, and {why}",
                f"layer {spec.layer}",
            )


def _same_attention(
    model: TransformersModel,
    module: nn.Module,
    function: Callable[..., Any] | None,
    spec: AttentionSpec,
    arguments: dict[str, Any],
) -> str:
    """Why it cannot be said whether they are the same; empty: they are. Raises Refusal if they are not."""
    if function is None:
        return f"the file of {type(module).__name__} has no attention function"
    generator = torch.Generator().manual_seed(0)
    device, dtype = next(model.foreign.parameters()).device, model.dtype

    def draw(heads: int, width: int) -> torch.Tensor:
        return torch.randn(1, heads, TOKENS, width, generator=generator).to(device, dtype)

    q, k, v = (
        draw(spec.num_heads, spec.head_dim),
        draw(spec.num_kv_heads, spec.head_dim),
        draw(spec.num_kv_heads, spec.v_head_dim),
    )
    try:
        out = function(module, q, k, v, _causal(dtype, device), **arguments)[0]
        found = out.float().reshape(TOKENS, spec.num_heads, spec.v_head_dim).transpose(0, 1)
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        return (
            f"{getattr(function, '__name__', 'its function')} of {type(module).__name__} fails: {type(error).__name__}: {text}"
        )
    expected = _attention(q[0].float(), k[0].float(), v[0].float(), spec, arguments.get("s_aux"))
    off = (found - expected).abs().amax()
    if bool((off > _NEAR.get(dtype, 0.05) * expected.abs().amax()).item()):
        raise Refusal(
            f"the attention of a {type(module).__name__} is not the softmax of scaled products over what a token sees "
            f"(off by {float(off):.2g})",
            f"layer {spec.layer}",
        )
    return ""


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    window: int | None = None,
) -> torch.Tensor:
    """``[heads, T, width]`` each, causal, by the formula."""
    k, v = (x.repeat_interleave(spec.group_size, dim=0) for x in (k, v))
    logits = spec.scale * q @ k.transpose(1, 2)
    if spec.soft_cap is not None:
        logits = spec.soft_cap * torch.tanh(logits / spec.soft_cap)
    logits = logits + torch.full_like(logits[0], -torch.inf).triu(1)
    if window is not None:
        logits = logits + torch.full_like(logits[0], -torch.inf).tril(-window)
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
