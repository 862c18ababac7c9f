"""Verifies a loaded foreign model on short passes: tokens must interact through attention, and nowhere else.

Attention is replaced in these passes, so that tokens are independent. They apply to any model, code
from a checkpoint among them.
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

from headrace.cache.states import state_views
from headrace.config import Decision
from headrace.kernels.state import StateMetadata
from headrace.model_spec import AttentionSpec, StateGroup
from headrace.models.capture import one_line
from headrace.models.fallback.contract import dense_attention
from headrace.models.fallback.hooks import hooked
from headrace.models.fallback.layout import TRANSFORMERS, TRANSFORMERS_OUT
from headrace.models.fallback.refusal import Unfit
from headrace.models.fallback.transformers.legacy_attention import forward_patch
from headrace.models.fallback.transformers.model import Attend, TransformersModel
from headrace.models.fallback.transformers.recurrence import Convolution, Recurrence
from headrace.models.fallback.transformers.states import Look as StateLook
from headrace.models.fallback.transformers.trace import KNOWN

TOKENS = 8
_POISONED = 1
"""Neither the first nor the last of its sequence: a model may go by positions and stop at a sequence's ends."""
_CHANGED = (1, 5, 2)
"""Tokens that are changed, one after another while others notice: rounding alone may send one of those to another expert."""
_GIVEN, _MADE = "given", "made"
_POSITION = 11
_NEAR = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Relative difference that rounding makes of equal tokens; other dtypes: 5 %."""
_DEFAULTS = threading.Lock()
"""Models may be loaded side by side."""

Look = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]], None]
"""Called with what a layer gives its attention: the layer, q, k, v, further arguments."""


@torch.inference_mode()
def verify(model: TransformersModel, longest: int) -> tuple[Decision, ...]:
    """Verifies a model. Returns what could not be verified, and why.

    Args:
        longest: tokens that a sequence may have.

    Raises:
        Unfit: the model cannot compute a step's packed tokens; names the module.
    """
    _tokens_are_apart(model)
    _find_first_position(model)
    _positions_are_given(model)
    _positions_are_apart(model, longest)
    _ids_are_apart(model)
    _forward_patches_agree(model)
    _states_are_states(model)
    return _attention_is_attention(model)


def run(
    model: TransformersModel,
    ids: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    *,
    look: Look | None = None,
    look_states: StateLook = lambda layer, call: None,
    own_positions: bool = False,
) -> torch.Tensor:
    """Runs all layers without attention, and with states that pass nothing on. Returns the hidden states ``[T, hidden]``.

    Args:
        ids: ``[T]`` int64; None: the same token throughout.
        positions: ``[T]`` int64; None: one sequence.
        own_positions: the model makes its positions itself.
    """
    device = next(model.foreign.parameters()).device
    ids = (torch.zeros(TOKENS, dtype=torch.int64) if ids is None else ids).to(device)[None]
    positions = (torch.arange(TOKENS) if positions is None else positions).to(device)[None]
    with model.calls.through(own_values(model, look)), model.calls.states.alone(look_states), model.calls.in_order():
        return model.body.hidden(ids, None if own_positions else positions)[0]


def own_values(model: TransformersModel, look: Look | None = None) -> Attend:
    """Replaces attention: a token gets only its own value."""
    layers = model.spec.layers

    def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        if look is not None:
            look(index, q, k, v, arguments)
        values = TRANSFORMERS.pack(v, "v", f"layer {index}").repeat_interleave(layers[index].group_size, dim=1)
        # What poisons a token's query or key poisons its result.
        poison = sum(0.0 * TRANSFORMERS.pack(x, "q", "").sum(dim=(1, 2), keepdim=True) for x in (q, k))
        return TRANSFORMERS_OUT.unpack(values + poison)

    return attend


def _differ(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the tensors differ by more than rounding, or by no number: NaN is not close to anything."""
    return not ((a - b).abs().amax() <= _NEAR.get(dtype, 0.05) * b.abs().amax()).item()


def _tokens_are_apart(model: TransformersModel) -> None:
    """Checks that a NaN token does not spread, as convolutions, recurrences and averages over a batch would do."""
    poisoned: list[bool] = []

    def poison(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        poisoned.append(True)
        out = out.clone()
        out.view(TOKENS, -1)[_POISONED] = torch.nan
        return out

    places = torch.arange(TOKENS)
    ids, positions = places % model.spec.num_tokens, places % (TOKENS // 2)

    def run_poisoned() -> torch.Tensor:
        with hooked([model.foreign.get_input_embeddings().register_forward_hook(poison)]):
            return run(model, ids, positions)

    broken = run_poisoned().isnan().flatten(1).any(1)
    if not poisoned:
        raise Unfit("it does not use its input embedding, so nothing can be said about it")
    broken[_POISONED] = False
    if broken.any():
        path, _ = _culprit(model, _POISONED, lambda: run(model, ids, positions), run_poisoned)
        kind = type(model.foreign.get_submodule(path)).__name__
        raise Unfit(f"a {kind} mixes tokens of different sequences, without attention", path)


def _find_first_position(model: TransformersModel) -> None:
    """Finds the position that the model itself gives a sequence's first token, and has positions begin there."""
    ids = torch.full((TOKENS,), min(5, model.spec.num_tokens - 1))
    try:
        expected = _everything(model, ids, own_positions=True)
    except Exception:
        # It computes with given positions, as the pass before has shown, and makes none of its own that begin elsewhere.
        return
    paddings = [module.padding_idx for module in model.foreign.modules() if isinstance(module, nn.Embedding)]
    for first in dict.fromkeys([0, *(padding + 1 for padding in paddings if padding is not None)]):
        model.body.first_position = first
        found = _everything(model, ids)
        if not any(_differ(a, b, model.dtype) for a, b in zip(found, expected, strict=True)):
            return
    raise Unfit("where its tokens stand is not counted from 0, and not from behind a padding index either")


def _everything(
    model: TransformersModel, ids: torch.Tensor, positions: torch.Tensor | None = None, own_positions: bool = False
) -> list[torch.Tensor]:
    """Returns the queries, keys and values of all layers, and the hidden states: ``[T, ...]`` each."""
    tensors: list[torch.Tensor] = []

    def look(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]) -> None:
        tensors.extend(TRANSFORMERS.pack(tensor, "q, k or v", f"layer {index}").float() for tensor in (q, k, v))

    hidden = run(model, ids, positions, look=look, own_positions=own_positions)
    return [*tensors, hidden.float()]


def _positions_are_given(model: TransformersModel) -> None:
    """Checks that equal tokens at one position are equal throughout the batch, which fails for a model that counts places."""

    def check(tensor: torch.Tensor, what: str) -> None:
        rows = tensor.flatten(1).float()
        if _differ(rows[:1], rows, model.dtype):
            raise Unfit(f"{what} depend on where in a batch a token stands: it does not go by position_ids")

    def look(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]) -> None:
        for name, tensor in (("queries", q), ("keys", k), ("values", v)):
            check(TRANSFORMERS.pack(tensor, name, f"layer {index}"), f"{name} of layer {index}")

    ids = torch.full((TOKENS,), min(5, model.spec.num_tokens - 1))
    check(run(model, ids, torch.full((TOKENS,), min(_POSITION, model.spec.max_position - 1)), look=look), "hidden states")


def _noticed(
    model: TransformersModel, tensors: tuple[torch.Tensor, torch.Tensor], axis: int, change: Callable[[int], int]
) -> tuple[int, list[torch.Tensor]] | None:
    """Tests whether a change of one token changes others.

    Args:
        tensors: ids and positions.
        axis: which of the two is changed.
        change: token -> its new value.

    Returns:
        A token that was noticed, and the changed ids and positions; None: there is one that was not.
    """
    expected = _everything(model, *tensors)
    for token in _CHANGED:
        changed = [tensor.clone() for tensor in tensors]
        changed[axis][token] = change(token)
        found = _everything(model, changed[0], changed[1])
        if not any(_others_differ(a, b, token, model.dtype) for a, b in zip(found, expected, strict=True)):
            return None
    return token, changed


def _positions_are_apart(model: TransformersModel, longest: int) -> None:
    """Checks that moving one token to the end of the context does not change others, as the longest sequence may do."""
    places = torch.arange(TOKENS)
    ids, positions = (3 + places) % model.spec.num_tokens, places.clamp(max=longest - 1)
    if _noticed(model, (ids, positions), 1, lambda token: longest - 1) is not None:
        raise Unfit(
            "what it computes for a token depends on how far others of the batch have come "
            f"(one is at position {longest - 1}), as with rotary frequencies that are chosen by the longest sequence: a lower "
            "max_model_len may end before they change"
        )


def _ids_are_apart(model: TransformersModel) -> None:
    """Checks that changing one token's id does not change others, as hashes of neighbouring ids do without spreading NaN."""
    count, positions = model.spec.num_tokens, torch.arange(TOKENS)
    ids = (3 + positions) % count
    noticed = _noticed(model, (ids, positions), 0, lambda token: (3 + TOKENS + token) % count)
    if noticed is None:
        return
    token, changed = noticed
    path, what = _culprit(model, token, lambda: run(model, ids, positions), lambda: run(model, *changed))
    kind = f"a {type(model.foreign.get_submodule(path)).__name__} {what}" if path else "it computes"
    raise Unfit(f"what {kind} for a token depends on the ids of other tokens, without attention", path)


def _culprit(model: TransformersModel, token: int, before: Callable[[], Any], after: Callable[[], Any]) -> tuple[str, str]:
    """Finds the first module in which a change of one token changes others.

    Returns:
        Its path, and what it does: what it makes is its own doing, what it is given its owner's. Empty: none was found.
    """
    with _rows_of_modules(model) as plain:
        before()
    with _rows_of_modules(model) as changed:
        after()
    for (path, way, a), (other, _, b) in zip(changed, plain, strict=False):
        if path == other and a.shape == b.shape and _others_differ(a.nan_to_num(nan=1e30), b, token, model.dtype):
            owner = path
            while owner and way == _GIVEN and (owner == path or isinstance(model.foreign.get_submodule(owner), nn.ModuleList)):
                owner = owner.rpartition(".")[0]
            return owner, "makes" if way == _MADE else f"gives {path.removeprefix(owner + '.')}"
    return "", ""


def _others_differ(a: torch.Tensor, b: torch.Tensor, token: int, dtype: torch.dtype) -> bool:
    """Whether rows other than ``token`` do. ``a``, ``b``: ``[T, ...]``."""
    others = [row for row in range(TOKENS) if row != token]
    return _differ(a[others], b[others], dtype)


@contextmanager
def _rows_of_modules(model: TransformersModel) -> Iterator[list[tuple[str, str, torch.Tensor]]]:
    """Collects what modules are given and make in one pass, in their order: (path, which of the two, ``[T, width]``)."""
    rows_seen: list[tuple[str, str, torch.Tensor]] = []

    def note(path: str, way: str, values: Iterable[Any]) -> None:
        for tensor in values:
            if isinstance(tensor, torch.Tensor):
                rows = tensor[0] if tensor.dim() > 1 and tensor.shape[0] == 1 else tensor
                if rows.dim() and rows.shape[0] == TOKENS:
                    rows_seen.append((path, way, rows.to(torch.float32, copy=True).reshape(TOKENS, -1)))

    def enter(path: str) -> Callable[..., None]:
        return lambda module, args, kwargs: note(path, _GIVEN, [*args, *kwargs.values()])

    def leave(path: str) -> Callable[..., None]:
        return lambda module, args, out: note(path, _MADE, out if isinstance(out, (tuple, list)) else [out])

    modules = list(model.foreign.named_modules())
    handles = [module.register_forward_pre_hook(enter(path), with_kwargs=True) for path, module in modules]
    with hooked([*handles, *(module.register_forward_hook(leave(path)) for path, module in modules)]):
        yield rows_seen


def _forward_patches_agree(model: TransformersModel) -> None:
    """Checks that patched forwards, with attention by the formula, compute what the modules' own do."""
    inputs: dict[nn.Module, dict[str, Any]] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
        inputs[module] = {name: value for name, value in named.items() if name not in ("self", "kwargs")} | named.get(
            "kwargs", {}
        )

    patched = [module for module in model.calls.modules if forward_patch(module) is not None]
    if not patched:
        return
    with hooked([module.register_forward_pre_hook(note, with_kwargs=True) for module in patched]):
        run(model)

    def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        spec = model.spec.layers[index]
        q, k, v = (TRANSFORMERS.pack(x, "q, k or v", "") for x in (q, k, v))
        out = dense_attention(q, k, v, spec, None, spec.window)
        return TRANSFORMERS_OUT.unpack(out).to(q.dtype)

    for index, module in enumerate(model.calls.modules):
        if module not in inputs:
            continue
        name, hidden = next(iter(inputs[module].items()))
        drawn = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(index)).to(hidden)
        arguments = inputs[module] | {name: drawn, "attention_mask": None}
        with model.calls.through(attend), model.calls.at(index):
            ours = module(**arguments)[0]
        theirs = type(module).forward(module, **arguments | {"attention_mask": _causal(drawn)})[0]
        if _differ(ours, theirs, model.dtype):
            off = float((ours - theirs).abs().amax())
            raise Unfit(
                f"a {type(module).__name__} is not what it is taken for: its patch computes something else (off by {off:.2g})",
                f"layer {index}",
            )


def _causal(like: torch.Tensor) -> torch.Tensor:
    """``[1, 1, T, T]``, to be added to logits."""
    mask = torch.full((TOKENS, TOKENS), torch.finfo(like.dtype).min, dtype=like.dtype, device=like.device)
    return mask.triu(1)[None, None]


def _states_are_states(model: TransformersModel) -> None:
    """Checks that the kernels compute what the library's functions with a state do, for a sequence of some tokens."""
    if not model.spec.states:
        return
    device = next(model.foreign.parameters()).device
    group = StateGroup(tuple(spec.planes(str(model.dtype).removeprefix("torch."), "float32") for spec in model.spec.states))
    views = state_views(torch.zeros(group.block_bytes, dtype=torch.uint8, device=device), group)
    ends, zero = (torch.tensor(each, dtype=torch.int32, device=device) for each in ([0, TOKENS], [0]))
    rows = StateMetadata(0, ends, zero, zero, TOKENS)

    def look(layer: int, call: Recurrence) -> None:
        state = views[layer].conv if isinstance(call, Convolution) else views[layer].state
        theirs = call.theirs()
        theirs = theirs[0] if isinstance(theirs, tuple) else theirs
        ours = None if state is None else call.run(state, rows)
        if ours is None or ours.shape != theirs.shape or _differ(ours.float(), theirs.float(), model.dtype):
            raise Unfit(f"a {type(call).__name__} of state layer {layer} is not what its name says")

    run(model, torch.arange(TOKENS) % model.spec.num_tokens, look_states=look)


def _attention_is_attention(model: TransformersModel) -> tuple[Decision, ...]:
    """Checks that the model's own attention function computes what the layer's spec says, in every layer.

    Returns:
        Which layers could not be compared, if any, and why.
    """
    arguments_of: dict[int, dict[str, Any]] = {}
    functions: dict[int, Callable[..., Any] | None] = {}

    def look(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]) -> None:
        arguments_of[index] = arguments
        file = sys.modules[type(model.calls.modules[index]).__module__]
        functions[index] = defaults.pop() if defaults else getattr(file, "eager_attention_forward", None)
        defaults.clear()

    with _defaults() as defaults:
        run(model, look=look)
    not_compared: dict[str, list[int]] = {}
    for index, module in enumerate(model.calls.modules):
        spec = model.spec.layers[index]
        if forward_patch(module) is not None:
            continue
        why = _compare_attention(model, module, functions[index], spec, arguments_of[index])
        if why:
            # An argument that headrace does not know may be ignored only if the model's own function ignores it too.
            for name, value in arguments_of[index].items():
                if name not in KNOWN and value is not None and not isinstance(value, bool):
                    raise Unfit(
                        f"the attention of a {type(module).__name__} takes {name}, which headrace's does not know, and {why}",
                        f"layer {spec.layer}",
                    )
            not_compared.setdefault(why, []).append(index)
    return tuple(
        Decision(
            "attention not compared", f"layers {', '.join(map(str, layers))}", f"{why}: doctor --parity compares the model"
        )
        for why, layers in not_compared.items()
    )


@contextmanager
def _defaults() -> Iterator[list[Callable[..., Any]]]:
    """Collects the functions that models pass to the interface as the default, whatever they are called."""
    found: list[Callable[..., Any]] = []
    theirs = AttentionInterface.get_interface

    def note(self: AttentionInterface, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        found.append(default)
        function: Callable[..., Any] = theirs(self, attn_implementation, default)
        return function

    with _DEFAULTS:
        AttentionInterface.get_interface = note
        try:
            yield found
        finally:
            AttentionInterface.get_interface = theirs


def _compare_attention(
    model: TransformersModel,
    module: nn.Module,
    function: Callable[..., Any] | None,
    spec: AttentionSpec,
    arguments: dict[str, Any],
) -> str:
    """Compares a model's own function with the formula. Returns why they cannot be compared. Raises Unfit if they differ."""
    if function is None:
        return f"the file of {type(module).__name__} has no attention function"
    generator = torch.Generator().manual_seed(0)
    shapes = ((spec.num_heads, spec.head_dim), (spec.num_kv_heads, spec.head_dim), (spec.num_kv_heads, spec.v_head_dim))
    q, k, v = (torch.randn(1, heads, TOKENS, width, generator=generator) for heads, width in shapes)
    like = next(model.foreign.parameters()).new_empty(0, dtype=model.dtype)
    q, k, v = (x.to(like) for x in (q, k, v))
    try:
        out = function(module, q, k, v, _causal(like), **arguments)[0]
        found = out.float().reshape(TOKENS, spec.num_heads, spec.v_head_dim)
    except Exception as error:
        return f"{getattr(function, '__name__', 'its function')} of {type(module).__name__} fails: {one_line(error, 200)}"
    q, k, v = (TRANSFORMERS.pack(x, "q, k or v", "") for x in (q, k, v))
    expected = dense_attention(q, k, v, spec, arguments.get("s_aux"))
    if _differ(found, expected, model.dtype):
        raise Unfit(
            f"the attention of a {type(module).__name__} is not the softmax of scaled products over what a token sees "
            f"(off by {float((found - expected).abs().amax()):.2g})",
            f"layer {spec.layer}",
        )
    return ""
