"""Traces a transformers model on the meta device: what each call of the attention interface is given.

The configuration is not read, since families use different field names. A forward pass without values
executes every line that serving will.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from headrace.model_spec import AttentionSpec, StateSpec
from headrace.models.capture import one_line
from headrace.models.fallback.hooks import hooked
from headrace.models.fallback.refusal import BrokenModel, Unfit
from headrace.models.fallback.transformers.head import SplitModel
from headrace.models.fallback.transformers.legacy_attention import WINDOW
from headrace.models.fallback.transformers.states import STATES, StateRecorder, TracedState, carries_state

WITH_MASKS = "headrace-trace"
"""The attention implementation of a traced model for which transformers makes masks, so that they can be inspected."""
_WITHOUT_MASKS = "headrace-trace-bare"
"""The one for which it makes none, as when the model is served."""
HANDLER = "_headrace_attention"
"""Attribute of the modules that attend: what computes their calls. While a model is traced, the recorder is that of every
module and config."""
TOKENS, _FEW = 4099, 8
"""Tokens of the pass, which costs nothing: enough to reach code for long contexts (compressed keys, indexers), and a number
that no dimension of a layer is likely to have. The second is for a first pass of models that may iterate over tokens."""

KNOWN = frozenset({"dropout", "is_causal", "position_ids", "s_aux", "scaling", "sliding_window", "softcap"})
"""Arguments of the interface that are understood."""
_TENSORS = frozenset({"position_ids", "s_aux"})
"""Arguments that may be tensors. Other tensor arguments change which tokens are attended to."""
_BIASED = "it adds biases by position to the logits (ALiBi, or learned ones), which headrace does not"
_CARRIES = (
    "it carries a state from token to token (a convolution, a state space or a recurrence) by code of its own, for which "
    "headrace has no kernel"
)
_BIASES = frozenset({"alibi", "position_bias"})
"""Arguments that bring biases on the logits to a module that computes attention by itself."""
_QUERIES = (0, 3, 1021, 262_147)
"""Positions at which masks are probed."""


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """One call of the attention interface."""

    path: str
    """Path of the calling module."""
    spec: AttentionSpec


@dataclasses.dataclass(frozen=True)
class Trace:
    """The calls of one forward pass."""

    body: str
    """Path of the module that has the layers, and that the head calls."""
    given: frozenset[str]
    """Names of the arguments that the head gives it."""
    calls: tuple[TracedCall, ...]
    """Calls in order: the index of a call is its layer's id."""
    states: tuple[StateSpec, ...]
    """The state layers."""
    state_calls: tuple[TracedState, ...]
    """Calls of functions with a state, in order."""
    hidden_size: int
    """Width of what the head is given."""
    vocab_size: int
    """Columns of its logits."""
    shared_inputs: tuple[tuple[str, ...], ...]
    """Linear modules of one parent with the same input tensor, in call order."""


def trace(model: PreTrainedModel, tokens: int = TOKENS, padding: bool = False) -> Trace:
    """Runs a model whose tensors are all on the meta device, built with the attention implementation ``WITH_MASKS``.

    Args:
        tokens: of the pass.
        padding: the model keeps its token for padding, if it knows one.

    Raises:
        Unfit: it asks for what headrace's attention does not do, or cannot run at all; ``BrokenModel`` if its code failed.
    """
    if not padding:
        forget_padding(model)
    stateful = getattr(model, "_is_stateful", False)
    for path, module in model.named_modules():
        if stateful and isinstance(module, nn.Conv1d) and not carries_state(model.get_submodule(path.rpartition(".")[0])):
            raise Unfit(_CARRIES, path)
    if stateful:
        # Such code may go token by token: what attends nowhere shows it in a few.
        _passed(model, _FEW, stateful)
    whole = _passed(model, tokens, stateful)
    whole.refuse_recurrent_layers()
    if not whole.body:
        raise Unfit("its layers cannot be told from its head")
    set_implementation(model, _WITHOUT_MASKS)
    ids = _ids(tokens)
    body, parts = SplitModel(model, whole.body, whole.given), _Recorder(model, tokens, masked=False)
    with parts.watching():
        hidden = body.hidden(ids, torch.zeros_like(ids))
        logits = body.logits(hidden)
    if [call.path for call in parts.calls] != [call.path for call in whole.calls] or parts.states.calls != whole.states.calls:
        raise Unfit("its layers attend in another order when they run apart from the head", whole.body)
    if hidden.shape[:2] != ids.shape or logits.shape[:2] != ids.shape:
        raise Unfit(f"it makes hidden states {list(hidden.shape)} and logits {list(logits.shape)} of {tokens} tokens")
    return Trace(
        body=whole.body,
        given=whole.given,
        calls=tuple(whole.calls),
        states=tuple(whole.states.specs),
        state_calls=tuple(whole.states.calls),
        hidden_size=hidden.shape[-1],
        vocab_size=logits.shape[-1],
        shared_inputs=parts.shared_inputs(),
    )


def _ids(tokens: int) -> torch.Tensor:
    """``[1, T]`` of nothing."""
    return torch.zeros(1, tokens, dtype=torch.int64, device="meta")


def _biased(model: PreTrainedModel) -> str:
    """Path of the first layer with an argument for biases on its logits; empty: none has."""
    for path, module in model.named_modules():
        if path.count(".") > 0 and not _BIASES.isdisjoint(inspect.signature(module.forward).parameters):
            return str(path)
    return ""


def _passed(model: PreTrainedModel, tokens: int, stateful: bool) -> _Recorder:
    """Records one pass of the whole model.

    Raises:
        Unfit: it fails, or attends nowhere.
    """
    recorder, ids = _Recorder(model, tokens, masked=True), _ids(tokens)
    try:
        with recorder.watching():
            model(input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=False)
    except BrokenModel as broken:
        raise Unfit(_CARRIES) if stateful else broken from None
    if not recorder.calls and not recorder.states.calls:
        if biased := _biased(model):
            raise Unfit(_BIASED, biased)
        bypassed = "none of its layers calls transformers' attention interface: its attention, if it has one, is its own"
        raise Unfit(_CARRIES if stateful else bypassed)
    return recorder


def set_implementation(model: PreTrainedModel, name: str) -> None:
    """Sets the attention implementation of every part of the model."""
    for config in _configs(model):
        config._attn_implementation_internal = name


def forget_padding(model: PreTrainedModel) -> None:
    """Removes the padding token: no step has any, and models with one look for it in every step, on the host."""
    for config in _configs(model):
        if getattr(config, "pad_token_id", None) is not None:
            # Past the checks of configurations that insist on a number.
            object.__setattr__(config, "pad_token_id", None)


def _configs(model: PreTrainedModel) -> list[Any]:
    """Returns the configs of all submodules, each once."""
    return list({id(config): config for module in model.modules() if (config := getattr(module, "config", None))}.values())


class _Recorder:
    """Records the calls of one pass."""

    def __init__(self, model: PreTrainedModel, tokens: int, masked: bool) -> None:
        self.calls: list[TracedCall] = []
        self.reading: set[str] = set()
        """Modules that read values on the host, or make shapes that depend on values."""
        self.masks: dict[int, int | str | None] = {}
        """Storage of a mask -> its window, or why it is not a window."""
        self._model = model
        self._tokens = tokens
        self._masked = masked
        """The model gets masks, so that a layer without one must be causal itself; otherwise an earlier pass has checked it."""
        self._paths = {module: path for path, module in model.named_modules()}
        self.states = StateRecorder(self._paths, tokens, self._note_body)
        self.body = ""
        """The first module that the model calls and that contains attention or a state."""
        self.given: frozenset[str] = frozenset()
        """Names of the arguments that it was called with."""
        self._stack: list[str] = []
        self._kept: list[torch.Tensor] = []
        """Keeps tensors alive, so that no storage address is reused."""
        self._kv: list[tuple[int, int]] = []
        """Storages of the keys and values of each call."""
        self._inputs: dict[tuple[str, int], list[str]] = {}
        """(parent, id of the input) -> the linear modules with that input."""

    @property
    def where(self) -> str:
        """Path of the innermost running module."""
        return self._stack[-1] if self._stack else ""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watches the model while it runs. Raises Unfit for whatever its code raises."""
        handles: list[Any] = []
        for module, path in self._paths.items():
            handles.append(module.register_forward_pre_hook(functools.partial(self._enter, path), with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave))
        # Attention asks modules for the recorder, and masks their configs.
        holders: list[Any] = [*self._paths, *_configs(self._model)]
        for holder in holders:
            holder.__dict__.update({HANDLER: self, STATES: self.states})
        try:
            with hooked(handles), torch.no_grad(), _MetaValues(self):
                yield
        except Unfit:
            raise
        except Exception as error:
            # The model does not run on packed tokens; the refusal says why.
            reason = f"it fails on packed tokens: {one_line(error)}"
            if self.where in self.reading:
                reason = "the shapes of what it computes depend on what it computes for a step's tokens"
            raise BrokenModel(reason, self.where) from error
        finally:
            for holder in holders:
                for name in (HANDLER, STATES):
                    holder.__dict__.pop(name, None)

    def _enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stack.append(path)
        if len(self._stack) == 2 and not self.body:
            self.given = frozenset(kwargs)
        if type(module) is nn.Linear and len(args) == 1:
            self._kept.append(args[0])
            self._inputs.setdefault((path.rpartition(".")[0], id(args[0])), []).append(path)

    def _leave(self, *_: Any) -> None:
        self._stack.pop()

    def _note_body(self) -> None:
        """Takes the module that the model calls now for the one with the layers."""
        if not self.body and len(self._stack) > 1:
            self.body = self._stack[1]

    def shared_inputs(self) -> tuple[tuple[str, ...], ...]:
        groups = (tuple(dict.fromkeys(paths)) for paths in self._inputs.values())
        return tuple(group for group in groups if len(group) > 1)

    def handed_out(self, mask: torch.Tensor, window: int | str | None) -> None:
        self._kept.append(mask)
        self.masks[_storage(mask)] = window

    def attend(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        """Notes one call; returns what the model goes on with."""
        path = self._paths[module]
        self._note_body()
        kinds = (type(part).__name__ for part in module.modules())
        if indexer := next((kind for kind in kinds if kind.endswith("Indexer")), None):
            raise Unfit(f"its {indexer} chooses the keys that a token sees, as headrace does in native models alone", path)
        _check_arguments(path, arguments)
        _check_shapes(path, self._tokens, q, k, v)
        window = self._window(path, module, mask, arguments)
        self._kept += [k, v]
        source = self._source(k, v, window)
        head_dim = q.shape[3]
        scale, cap = arguments.get("scaling"), arguments.get("softcap")
        spec = AttentionSpec(
            layer=len(self.calls),
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=head_dim,
            v_head_dim=v.shape[3],
            scale=float(head_dim**-0.5 if scale is None else scale),
            window=window,
            soft_cap=None if not cap else float(cap),
            sinks=arguments.get("s_aux") is not None,
            kv_source=source,
        )
        self._kv.append((_storage(k), _storage(v)))
        self.calls.append(TracedCall(path, spec))
        return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])

    def _window(self, path: str, module: nn.Module, mask: torch.Tensor | None, arguments: dict[str, Any]) -> int | None:
        own: int | None = arguments.get(WINDOW)
        if mask is None:
            causal = arguments.get("is_causal")
            if self._masked and not (getattr(module, "is_causal", True) if causal is None else causal):
                raise Unfit("its tokens see those after them", path)
            return own
        if _storage(mask) not in self.masks:
            raise Unfit(
                "it changes the attention mask itself, or makes its own: a bias on the logits, or another pattern", path
            )
        window = self.masks[_storage(mask)]
        if isinstance(window, str):
            raise Unfit(window, path)
        return min((one for one in (window, own) if one is not None), default=None)

    def _source(self, k: torch.Tensor, v: torch.Tensor, window: int | None) -> int | None:
        """Returns the earlier layer with these keys and values; None: they are the layer's own."""
        storages = (_storage(k), _storage(v))
        for call, other in zip(self.calls, self._kv, strict=True):
            source = call.spec
            enough = source.window is None or (window is not None and window <= source.window)
            if storages == other and source.kv_source is None and source.num_kv_heads == k.shape[1] and enough:
                return source.layer
        return None

    def refuse_recurrent_layers(self) -> None:
        """Refuses the first layer without attention, in a model that declares a state and calls no function with one."""
        if not getattr(self._model, "_is_stateful", False) or self.states.calls:
            return
        called = [call.path for call in self.calls]
        stacks = {path.rpartition(".layers.")[0] + ".layers" for path in called if ".layers." in path}
        for stack in stacks:
            for name, layer in self._model.get_submodule(stack).named_children():
                if not any(path.startswith(f"{stack}.{name}.") for path in called):
                    raise Unfit(
                        f"a {type(layer).__name__} without attention, of a model that carries a state", f"{stack}.{name}"
                    )


class _MetaValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers questions about the values of tensors that have none: yes, zero, nowhere. Notes who asks."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        aten, packet = torch.ops.aten, func.overloadpacket
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if first is not None and first.is_meta:
            if packet is aten.split_with_sizes and not any(args[1]):
                # Sizes that were read, and so are zeros: all of it goes to the first.
                dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
                return func(first, [first.shape[dim], *args[1][1:]], *args[2:], **kwargs)
            if packet is aten._to_copy and torch.device(kwargs.get("device") or "meta").type != "meta":
                return self._read(torch.zeros(first.shape, dtype=kwargs.get("dtype") or first.dtype))
            if packet is aten.index and any(_is_mask(index) for index in args[1]):
                return self._read(func(first, [part for index in args[1] for part in _places(index)], **kwargs))
            if packet is aten._local_scalar_dense:
                return self._read(True if first.dtype is torch.bool else 0.0 if first.dtype.is_floating_point else 0)
            if packet is aten.equal:
                return self._read(True)
            if packet is aten.nonzero:
                return self._read(first.new_empty(0, first.dim(), dtype=torch.int64))
            if packet is aten.masked_select:
                return self._read(first.new_empty(0))
        return func(*args, **kwargs)

    def _read(self, answer: Any) -> Any:
        self._recorder.reading.add(self._recorder.where)
        return answer


class _Zeros(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes tensors without values for zeros."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        filled = [torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, torch.Tensor) and x.is_meta else x for x in args]
        return func(*filled, **kwargs or {})


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _places(index: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Converts a mask to empty indices, since its values are unknown."""
    if index is None or not _is_mask(index):
        return [index]
    return [index.new_empty(0, dtype=torch.int64) for _ in range(index.dim())]


def _check_arguments(path: str, arguments: dict[str, Any]) -> None:
    """Plain values with unknown names pass: they are given to the model's own attention function when it is compared."""
    for name in ("scaling", "softcap"):
        value = arguments.get(name)
        if value is not None and not isinstance(value, int | float):
            raise Unfit(f"its {name} is a {type(value).__name__} that is computed in every step", path)
    for name, value in arguments.items():
        if name not in _TENSORS and _holds_tensor(value):
            if name == "position_bias":
                raise Unfit(_BIASED, path)
            raise Unfit(f"its attention takes {name}, to which headrace's has no equal", path)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(_holds_tensor, value))
    return isinstance(value, torch.Tensor)


def _check_shapes(path: str, tokens: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4 or tensor.shape[0] != 1:
            raise Unfit(f"{name} has the shape {list(tensor.shape)}, not [1, heads, tokens, width]", path)
    if q.shape[2] != tokens or k.shape[2] != q.shape[2] or v.shape[2] != q.shape[2]:
        raise Unfit(
            f"{q.shape[2]} queries attend to {k.shape[2]} keys where {tokens} tokens were given: it attends to something else "
            "(another sequence, or blocks of tokens)",
            path,
        )
    if k.shape[3] != q.shape[3] or v.shape[1] != k.shape[1] or q.shape[1] % k.shape[1]:
        raise Unfit(f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not go together", path)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def window_of(sees: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> int | None:
    """Returns the window of a mask: a token sees itself and ``window - 1`` before it; None: all before it.

    Args:
        sees: (positions of queries, positions of keys) -> whether each query sees its key.

    Raises:
        Unfit: the mask is of another kind.
    """
    counts = []
    for query in _QUERIES:
        keys = torch.arange(query + 2)
        seen = sees(torch.full_like(keys, query), keys).expand(keys.shape)
        count = int(seen.sum())
        expected = (keys <= query) & (keys > query - count)
        if not count or not torch.equal(seen, expected):
            raise Unfit("its attention mask is neither causal nor a sliding window")
        counts.append(count)
    window = counts[-1]
    if any(count != min(window, query + 1) for count, query in zip(counts, _QUERIES, strict=True)):
        raise Unfit("its attention mask is neither causal nor a sliding window: how far a token sees depends on its place")
    return None if window == _QUERIES[-1] + 1 else window


def handled_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers: calls the module's handler."""
    handler = module.__dict__.get(HANDLER)
    if handler is None:
        raise ValueError("attention implementation 'headrace' works in models that headrace has loaded, and in no others")
    return handler.attend(module, query, key, value, attention_mask, arguments), None


def _traced_mask(
    *, q_length: int, kv_length: int, mask_function: Callable[..., Any], dtype: torch.dtype, config: Any, **_: Any
) -> torch.Tensor:
    def sees(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros((), dtype=torch.int64)
        seen = mask_function(zero, zero, queries, keys)
        return seen if isinstance(seen, torch.Tensor) else torch.as_tensor(seen)

    window: int | str | None
    try:
        window = window_of(sees)
    except Unfit as refusal:
        # It is no matter unless a layer uses it.
        window = refusal.reason
    except Exception:
        window = "its attention mask depends on more than where tokens stand"
        with contextlib.suppress(Exception), _Zeros():  # type: ignore[no-untyped-call]
            try:
                window_of(sees)
            except Unfit as refusal:
                # As for a step without padding, of which such tensors are made.
                window = refusal.reason
    mask = torch.empty(1, 1, q_length, kv_length, dtype=dtype, device="meta")
    recorder: _Recorder = config.__dict__[HANDLER]
    recorder.handed_out(mask, window)
    return mask


AttentionInterface.register(WITH_MASKS, handled_attention)
AttentionInterface.register(_WITHOUT_MASKS, handled_attention)
AttentionMaskInterface.register(WITH_MASKS, _traced_mask)
