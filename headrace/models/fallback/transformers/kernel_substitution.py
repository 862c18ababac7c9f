"""Substitutes headrace's kernels for parts of a foreign model that compute the same.

Parts are recognised by what they compute, not by their names: a part runs on a probe of random values, large ones included, and
so is the candidate; only where they agree does the candidate replace it. Modules and their weights stay where they are.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from headrace.attention.layer import Attention
from headrace.kernels.activation import gelu_tanh_mul, silu_mul
from headrace.kernels.norm import add_rms_norm, rms_norm
from headrace.kernels.rotary.reference import rotate_ref
from headrace.model_spec import AttentionSpec
from headrace.models.fallback.hooks import hooked
from headrace.models.fallback.layout import TRANSFORMERS, TRANSFORMERS_OUT
from headrace.models.fallback.transformers.fuse import FusedPart, layer_of, product
from headrace.models.fallback.transformers.model import TransformersModel
from headrace.models.fallback.transformers.verify import own_values, run

_TOKENS = 8
_NEAR = {torch.float32: 1e-4, torch.float64: 1e-6}
"""Relative to the largest value; other dtypes: 2 %."""
_ACTIVATIONS = 4096
"""Numbers, at least, that activations are compared by."""
_ROUNDED = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
_SMALL = 1e-6
_EPS = ("variance_epsilon", "eps", "norm_eps")
_HEAD_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("query_layernorm", "key_layernorm"))

Candidate = Callable[..., Any]
"""A forward that may replace a module's own."""
Probe = Callable[[Candidate], Sequence[Any]]
"""Runs a forward on probe inputs: what must be equal, tensors or None, and pairs of a tensor and its bounds."""


@torch.inference_mode()
def substitute_kernels(model: TransformersModel) -> str:
    """Substitutes kernels in a verified model. Returns how many modules they compute, for reports."""
    modules, given = list(model.foreign.modules()), _given(model)
    norms = {module: module.forward for module in modules if substitute_norm(module, model.dtype)}
    # While every norm is still called by its module.
    followers = _followers(model, norms, given)
    mlps = [module for module in modules if substitute_mlp(module, model.dtype)]
    attentions = [index for index in range(len(model.calls.modules)) if _substitute_attention(model, index, norms, given)]
    layers: dict[nn.Module, Any] = {
        layer: layer.forward for layer in given if _substitute_layer(model, layer, norms, given[layer])
    }
    chained = followers.keys() & layers.keys()
    for layer in chained:
        layers[layer].after = followers[layer]
    for module in modules:
        if type(module) is nn.Linear:
            module.forward = MatrixProduct(module)  # type: ignore[method-assign]
    sums = f"{len(layers)} layers' sums, {len(chained)} with the norm of the next"
    return f"{len(norms)} norms, {len(mlps)} MLPs, {len(attentions)} attentions, {sums}"


def replace_if_equal(module: nn.Module, candidate: Candidate, probe: Probe) -> bool:
    """Replaces a module's forward by ``candidate`` if their results on a probe are equal. Returns whether it did."""
    try:
        theirs, ours = probe(module), probe(candidate)
    except Exception:
        # A module that does not run this way is not of the candidate's kind.
        return False
    if len(ours) != len(theirs) or not all(map(_equal, ours, theirs)):
        return False
    module.forward = candidate
    return True


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, tuple):
        (ours, _), (theirs, bounds) = ours, theirs
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return False
        return bool(((ours.float() - theirs.float()).abs() <= bounds).all().item())
    if not isinstance(theirs, torch.Tensor) or ours is None or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return ours is None and theirs is None
    a, b = ours.float(), theirs.float()
    near = _NEAR.get(theirs.dtype, 0.02)
    return bool(((a - b).abs().amax() <= near * b.abs().amax()).item()) and bool(b.isfinite().all().item())


def _random(like: torch.Tensor, *shape: int, size: float) -> torch.Tensor:
    """Returns random values, the same on every device."""
    generator = torch.Generator().manual_seed(sum(shape))
    return (size * torch.randn(shape, generator=generator)).to(like.device, like.dtype)


class MatrixProduct:
    """Computes a plain linear module with the engine's own matrix product."""

    def __init__(self, module: nn.Linear) -> None:
        self.layer = layer_of(module.weight, module.bias)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return product(input, self.layer)


# Norms


class Norm:
    """An RMS norm with a foreign module's weight: a ``HeadNorm``."""

    plain = True
    offset = False

    def __init__(self, module: nn.Module, eps: float) -> None:
        self._module = module
        self.eps = eps
        self._ahead: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def weight(self) -> torch.Tensor:
        weight: torch.Tensor = self._module.weight  # type: ignore[assignment]
        return weight

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is heads:
            return ahead[1]
        # Kernels take tokens and heads; a foreign module has a batch axis before them.
        rows = heads.flatten(0, -3) if heads.ndim > 3 else heads
        return rms_norm(rows, self.weight, self.eps).view(heads.shape)

    def of_sum(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """``x + residual``. Its norm is computed with it, and kept for the call that asks for the norm of this tensor."""
        normed, total = add_rms_norm(x, residual, self.weight, self.eps)
        self._ahead = (total, normed)
        return total


def substitute_norm(module: nn.Module, dtype: torch.dtype) -> bool:
    parameters = dict(module.named_parameters())
    eps = [value for name in _EPS if isinstance(value := getattr(module, name, None), float)]
    gated = len(inspect.signature(module.forward).parameters) > 1
    if list(parameters) != ["weight"] or list(module.children()) or len(eps) != 1 or gated:
        return False
    weight = parameters["weight"]
    if weight.dim() != 1 or weight.dtype != dtype or "forward" in module.__dict__:
        return False
    # One row is not centred, one is so small that the epsilon counts.
    x = _random(weight, 1, 3, len(weight), size=3.0)
    x[0, 1] += 5.0
    x[0, 2] *= eps[0] ** 0.5
    return replace_if_equal(module, Norm(module, eps[0]), lambda forward: list(forward(x)[0]))


# MLPs


class FusedMLP:
    """``down(act(gate(x)) * up(x))`` with the matrices of a foreign module, gate and up as one."""

    def __init__(self, gate: FusedPart, down: nn.Module, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._gate_up = gate.product
        self._down = down
        self._act = act

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._down(self._act(product(x, self._gate_up.layer)))
        return out


def substitute_mlp(module: nn.Module, dtype: torch.dtype) -> bool:
    parts = [child for child in module.children() if isinstance(child, FusedPart)]
    others = [child for child in module.children() if type(child) is nn.Linear]
    if len(parts) != 2 or len(others) != 1 or parts[0].product is not parts[1].product:
        return False
    gate, down = min(parts, key=lambda part: part.index), others[0]
    width = down.in_features
    if gate.product.rows != [width, width] or gate.weight.dtype != dtype:
        return False
    # Wide enough for activations to differ, whatever the size of the weights.
    x = _random(gate.weight, 1, _ACTIVATIONS // width + 1, gate.in_features, size=1.0)
    x *= 3.0 / (x @ gate.weight.T).float().std().clamp_min(1e-6).to(x.dtype)
    left, right = product(x, gate.product.layer).float().chunk(2, dim=-1)
    # Where an activation is a small difference of two numbers near 1, the rounding is float32's.
    absolute = _SMALL * (left * right).abs().clamp_min(0.1)

    def probe(forward: Candidate) -> Sequence[Any]:
        """Compares the products too: large outputs would hide the difference between gelu and its approximation."""
        found: list[tuple[torch.Tensor, torch.Tensor]] = []

        def note(_: nn.Module, args: tuple[torch.Tensor]) -> None:
            found.append((args[0], _ROUNDED.get(args[0].dtype, 0.0) * args[0].float().abs() + absolute))

        with hooked([down.register_forward_pre_hook(note)]):
            return [forward(x), *found]

    return any(replace_if_equal(module, FusedMLP(gate, down, act), probe) for act in (silu_mul, gelu_tanh_mul))


# Attention


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The parts of a standard attention module."""

    qkv: FusedPart
    """The first of the three."""
    output: nn.Linear
    q_norm: Norm | None
    k_norm: Norm | None


class FusedAttention:
    """Projection, norms, rotation, attention, projection: a foreign attention module, from and to hidden states."""

    def __init__(self, model: TransformersModel, index: int, rotary_dim: int, parts: _Parts) -> None:
        self._calls, self._angles, self._cell = model.calls, model.angles, model.cell
        self._module = model.calls.modules[index]
        self._parts = parts
        self._attention = Attention(dataclasses.replace(model.spec.layers[index], rotary_dim=rotary_dim))
        self._where = f"layer {index}"

    def __call__(
        self, hidden_states: torch.Tensor, *, position_embeddings: Any = None, **rest: Any
    ) -> tuple[torch.Tensor, None]:
        """``[1, T, hidden] -> [1, T, hidden]``. Ignores transformers' arguments for masks and caches."""
        index = self._calls.turn(self._module)
        parts, fused = self._parts, self._parts.qkv.product
        cos_sin = self._angles.of(position_embeddings) if self._attention.spec.rotary_dim else None
        qkv = fused.layer.forward(hidden_states[0])
        if self._calls.substitute is None:
            out = self._attention.forward_qkv(qkv, self._cell.context(self._where), cos_sin, parts.q_norm, parts.k_norm)
        else:
            q, k, v = self._unfused(qkv, cos_sin)
            out = TRANSFORMERS_OUT.pack(self._calls.substitute(index, q, k, v, {}), "out", "").flatten(1)
        return parts.output(out)[None], None

    def _unfused(self, qkv: torch.Tensor, cos_sin: torch.Tensor | None) -> Iterable[torch.Tensor]:
        """Reference of ``forward_qkv`` before attention: q, k and v in the layout of the foreign module."""
        spec = self._attention.spec
        q, k, v = torch.split(qkv, self._parts.qkv.product.rows, dim=-1)
        q, k, v = (x.view(len(x), -1, width) for x, width in ((q, spec.head_dim), (k, spec.head_dim), (v, spec.v_head_dim)))
        if self._parts.q_norm is not None and self._parts.k_norm is not None:
            q, k = self._parts.q_norm(q), self._parts.k_norm(k)
        if cos_sin is not None:
            q, k = rotate_ref(q, k, cos_sin, spec.rotary_dim)
        return (TRANSFORMERS.unpack(x) for x in (q, k, v))


Given = dict[nn.Module, dict[str, Any]]
"""Module -> its arguments by name; empty where they came in another way."""


def _given(model: TransformersModel) -> Given:
    """Records the arguments of the attention modules and of the layers around them in one pass."""
    given: Given = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given[module] = dict(kwargs) if not args else {"hidden_states": args[0], **kwargs} if len(args) == 1 else {}

    attending = set(model.calls.modules)
    around = {module for module in model.foreign.modules() if attending & set(module.children())}
    _run_hooked(model, (module.register_forward_pre_hook(note, with_kwargs=True) for module in attending | around))
    return given


def _run_hooked(model: TransformersModel, handles: Iterable[RemovableHandle]) -> None:
    """Runs all layers over a few tokens with near and far positions, and removes the hooks afterwards."""
    last = model.spec.max_position - 1
    places = torch.tensor([0, 1, 2, min(7, last), last // 3, last // 2, max(last - 1, 0), last])
    with hooked(handles):
        run(model, positions=places)


def _substitute_attention(model: TransformersModel, index: int, norms: Mapping[nn.Module, Norm], given: Given) -> bool:
    """Replaces a standard attention module by our kernels. Returns whether it did."""
    module, spec = model.calls.modules[index], model.spec.layers[index]
    parts = None if model.calls.modules.count(module) > 1 else _parts(module, spec, norms, model.dtype)
    if parts is None or "hidden_states" not in given[module]:
        return False
    # Large enough for clamps to be met.
    hidden = _random(parts.qkv.weight, 1, _TOKENS, parts.qkv.weight.shape[1], size=30.0)

    def probe(forward: Candidate) -> Sequence[Any]:
        found: list[Any] = []

        def look(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]) -> None:
            found.extend((q, k, v))

        model.angles.forget()
        with model.calls.through(own_values(model, look)), model.calls.at(index):
            out, weights = forward(**given[module] | {"hidden_states": hidden})
        return [*found, out, weights]

    rotations = [0]
    embeddings: Any = given[module].get("position_embeddings")
    if isinstance(embeddings, tuple) and len(embeddings) == 2 and isinstance(embeddings[0], torch.Tensor):
        channels = embeddings[0].shape[-1]
        if channels <= spec.head_dim and channels % 2 == 0 and all(x.shape == (1, _TOKENS, channels) for x in embeddings):
            rotations.append(channels)
    return any(replace_if_equal(module, FusedAttention(model, index, channels, parts), probe) for channels in rotations)


def _parts(module: nn.Module, spec: AttentionSpec, norms: Mapping[nn.Module, Norm], dtype: torch.dtype) -> _Parts | None:
    if spec.kv_source is not None or spec.sinks:
        return None
    fused = sorted((child for child in module.children() if isinstance(child, FusedPart)), key=lambda part: part.index)
    others = [child for child in module.children() if type(child) is nn.Linear]
    if len(fused) != 3 or len(others) != 1 or len({id(part.product) for part in fused}) != 1:
        return None
    if fused[0].product.rows != [spec.q_size, spec.k_size, spec.v_size] or others[0].in_features != spec.out_size:
        return None
    if fused[0].weight.dtype != dtype:
        return None
    for names in _HEAD_NORMS:
        pair = [child for name, child in module.named_children() if name in names]
        if pair:
            if len(pair) != 2 or any(norm not in norms or norms[norm].weight.shape != (spec.head_dim,) for norm in pair):
                return None
            q_norm, k_norm = (norms[module.get_submodule(name)] for name in names)
            return _Parts(fused[0], others[0], q_norm, k_norm) if q_norm.eps == k_norm.eps else None
    return _Parts(fused[0], others[0], None, None)


# Layers


class PreNormLayer:
    """``x + attention(norm(x))``, and then ``x + mlp(norm(x))``: each sum is one kernel with the norm after it."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, before: Norm, between: Norm) -> None:
        self._attention = attention
        self._mlp = mlp
        self._before = before
        self._between = between
        self.after: Norm | None = None
        """The norm that reads this layer's output: the next layer's first, or the model's last."""

    def __call__(self, hidden_states: torch.Tensor, **rest: Any) -> torch.Tensor:
        mixed = self._attention(hidden_states=self._before(hidden_states), **rest)[0]
        normed, total = add_rms_norm(mixed, hidden_states, self._between.weight, self._between.eps)
        out: torch.Tensor = self._mlp(normed)
        return total + out if self.after is None else self.after.of_sum(out, total)


def _substitute_layer(
    model: TransformersModel, layer: nn.Module, norms: Mapping[nn.Module, Norm], arguments: dict[str, Any]
) -> bool:
    """Replaces a layer that equals a ``PreNormLayer``. Returns whether it did."""
    children = list(layer.children())
    attending = [child for child in children if child in model.calls.modules]
    own_norms = [norms[child] for child in children if child in norms]
    others = [child for child in children if child not in norms and child not in attending]
    if len(attending) != 1 or len(own_norms) != 2 or len(others) != 1 or "hidden_states" not in arguments:
        return False
    # Small, so that what the layer adds to them outweighs them, whatever it is multiplied by.
    hidden = arguments["hidden_states"]
    arguments = arguments | {"hidden_states": _random(hidden, *hidden.shape, size=0.01)}

    def probe(forward: Candidate) -> Sequence[Any]:
        with model.calls.through(own_values(model)), model.calls.at(model.calls.modules.index(attending[0])):
            out = forward(**arguments)
        if not isinstance(out, torch.Tensor):
            raise TypeError(f"the layer returns a {type(out).__name__}")
        return [out]

    return any(
        replace_if_equal(layer, PreNormLayer(attending[0], others[0], *pair), probe) for pair in (own_norms, own_norms[::-1])
    )


def _followers(model: TransformersModel, norms: Mapping[nn.Module, Norm], layers: Iterable[nn.Module]) -> dict[nn.Module, Norm]:
    """Layer -> the norm that is given the very tensor that the layer returns."""
    made: list[tuple[torch.Tensor, nn.Module]] = []
    found: dict[nn.Module, Norm] = {}

    def returned(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        made.append((output, layer))

    def normed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for x in (*args, *kwargs.values()):
            for output, layer in made:
                if output is x:
                    found.setdefault(layer, norms[module])

    handles = [layer.register_forward_hook(returned) for layer in layers]
    handles += [module.register_forward_pre_hook(normed, with_kwargs=True) for module in norms]
    _run_hooked(model, handles)
    return found
