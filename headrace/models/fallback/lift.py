"""Parts of a foreign model that are what headrace has kernels for, computed by those.

A part is recognised by what it computes, not by its name: it is run on random values, large ones among them, and so is our
version; only where they agree does ours take its place. The modules and their weights stay where they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from headrace.attention.layer import Attention
from headrace.kernels.activation import gelu_tanh_mul, silu_mul
from headrace.kernels.linear import linear
from headrace.kernels.norm import add_rms_norm, rms_norm
from headrace.kernels.rotary import rotate_twin
from headrace.models.fallback.fuse import FusedPart, product
from headrace.models.fallback.layout import TRANSFORMERS
from headrace.models.fallback.rotary import Angles
from headrace.models.fallback.transformers import Calls, TransformersModel
from headrace.models.fallback.verify import own_values, run
from headrace.spec import AttentionSpec

_TOKENS = 8
_NEAR = {torch.float32: 1e-4, torch.float64: 1e-6}
"""Relative to the largest value; other dtypes: 2 %."""
_ACTIVATIONS = 4096
"""Numbers, at least, that activations are compared by."""
_ROUNDED = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
_SMALL = 1e-6
_EPS = ("variance_epsilon", "eps", "norm_eps")
_HEAD_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("query_layernorm", "key_layernorm"))


@dataclasses.dataclass(frozen=True)
class Lifted:
    """How many modules ours compute now."""

    norms: int
    mlps: int
    attentions: int
    layers: int
    chained: int
    """Layers whose last sum is one kernel with the norm that follows."""

    def __str__(self) -> str:
        sums = f"{self.layers} layers' sums, {self.chained} with the norm of the next"
        return f"{self.norms} norms, {self.mlps} MLPs, {self.attentions} attentions, {sums}"


@torch.inference_mode()
def lift(model: TransformersModel) -> Lifted:
    """Has our kernels compute what they compute alike. The model must have been verified."""
    modules, dtype = list(model.foreign.modules()), model.dtype
    norms = {module: norm for module in modules if (norm := _as_norm(module, dtype)) is not None}
    mlps = {module: mlp for module in modules if (mlp := _as_mlp(module, dtype)) is not None}
    given = _given(model)
    attentions = _as_attentions(model, norms, given)
    layers = _as_layers(model, norms, given)
    followers = _followers(model, norms, layers)
    for layer, norm in followers.items():
        layers[layer].after = norm
    for module in modules:
        if type(module) is nn.Linear:
            module.forward = Matrix(module)  # type: ignore[method-assign]
    for module, ours in [*norms.items(), *mlps.items(), *attentions.items(), *layers.items()]:
        module.forward = ours  # type: ignore[assignment]
    return Lifted(len(norms), len(mlps), len(attentions), len(layers), len(followers))


def _alike(ours: torch.Tensor, theirs: Any) -> bool:
    if not isinstance(theirs, torch.Tensor) or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    near = _NEAR.get(theirs.dtype, 0.02)
    a, b = ours.float(), theirs.float()
    return bool(((a - b).abs().amax() <= near * b.abs().amax()).item()) and bool(b.isfinite().all().item())


def _draw(like: torch.Tensor, *shape: int, size: float) -> torch.Tensor:
    """The same values on every device."""
    generator = torch.Generator().manual_seed(sum(shape))
    return (size * torch.randn(shape, generator=generator)).to(like.device, like.dtype)


class Matrix:
    """A plain linear module by the engine's own matrix product."""

    def __init__(self, module: nn.Linear) -> None:
        self._module = module

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return product(input, self._module.weight, self._module.bias)


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
        return ahead[1] if ahead is not None and ahead[0] is heads else rms_norm(heads, self.weight, self.eps)

    def of_sum(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """``x + residual``. Its norm is computed with it, and kept for the call that asks for the norm of this tensor."""
        normed, total = add_rms_norm(x, residual, self.weight, self.eps)
        self._ahead = (total, normed)
        return total


def _as_norm(module: nn.Module, dtype: torch.dtype) -> Norm | None:
    parameters = dict(module.named_parameters())
    eps = [value for name in _EPS if isinstance(value := getattr(module, name, None), float)]
    if list(parameters) != ["weight"] or list(module.children()) or len(eps) != 1:
        return None
    weight = parameters["weight"]
    if weight.dim() != 1 or weight.dtype != dtype or "forward" in module.__dict__:
        return None
    ours = Norm(module, eps[0])
    # One row is not centred, one is so small that the epsilon counts.
    x = _draw(weight, 1, 3, len(weight), size=3.0)
    x[0, 1] += 5.0
    x[0, 2] *= eps[0] ** 0.5
    try:
        theirs = module(x)
    except Exception:
        return None
    rows = zip(ours(x)[0], theirs[0], strict=True) if isinstance(theirs, torch.Tensor) and theirs.shape == x.shape else ()
    return ours if rows and all(_alike(a, b) for a, b in rows) else None


# MLPs


class GatedMLP:
    """``down(act(gate(x)) * up(x))`` with the matrices of a foreign module, gate and up as one."""

    def __init__(self, gate: FusedPart, down: nn.Module, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._gate_up = gate.product
        self._down = down
        self._act = act

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._down(self._act(product(x, self._gate_up.weight, self._gate_up.bias)))
        return out


def _as_mlp(module: nn.Module, dtype: torch.dtype) -> GatedMLP | None:
    parts = [child for child in module.children() if isinstance(child, FusedPart)]
    others = [child for child in module.children() if type(child) is nn.Linear]
    if len(parts) != 2 or len(others) != 1 or parts[0].product is not parts[1].product:
        return None
    gate, down = min(parts, key=lambda part: part.index), others[0]
    width = down.in_features
    if gate.product.rows != [width, width] or gate.weight.dtype != dtype:
        return None
    # Wide enough for activations to differ, whatever the size of the weights.
    x = _draw(gate.weight, 1, _ACTIVATIONS // width + 1, gate.in_features, size=1.0)
    x *= 3.0 / product(x, gate.weight, None).float().std().clamp_min(1e-6).to(x.dtype)
    products: list[torch.Tensor] = []
    seen = down.register_forward_pre_hook(lambda _, given: products.append(given[0]))
    try:
        theirs = module(x)
    except Exception:
        return None
    finally:
        seen.remove()
    factors = product(x, gate.product.weight, gate.product.bias)
    for act in (silu_mul, gelu_tanh_mul):
        ours = GatedMLP(gate, down, act)
        if len(products) == 1 and _same_activation(act, factors, products[0]) and _alike(ours(x), theirs):
            return ours
    return None


def _same_activation(act: Callable[[torch.Tensor], torch.Tensor], factors: torch.Tensor, products: torch.Tensor) -> bool:
    """Whether ``products`` is ``act`` of ``factors``, gate and up side by side, number by number up to rounding: the largest of
    an MLP's outputs would hide what parts a gelu from its approximation by tanh.
    """
    ours = act(factors)
    if ours.shape != products.shape or ours.dtype != products.dtype:
        return False
    a, b, (gate, up) = ours.float(), products.float(), factors.float().chunk(2, dim=-1)
    # Two roundings; and where an activation is a small difference of two numbers near 1, those of float32.
    bound = _ROUNDED.get(ours.dtype, 0.0) * b.abs() + _SMALL * (gate * up).abs().clamp_min(0.1)
    return bool(((a - b).abs() <= bound).all().item())


# Attention


@dataclasses.dataclass(frozen=True)
class _Parts:
    """Of an attention module, if it is of the usual kind."""

    qkv: FusedPart
    """The first of the three."""
    output: nn.Linear
    q_norm: Norm | None
    k_norm: Norm | None


class SelfAttention:
    """Projection, norms, rotation, attention, projection: a foreign attention module, from and to hidden states."""

    def __init__(self, model: TransformersModel, index: int, spec: AttentionSpec, parts: _Parts, angles: Angles) -> None:
        self._calls: Calls = model.calls
        self._module = model.calls.modules[index]
        self._cell = model.cell
        self._parts = parts
        self._angles = angles
        self._attention = Attention(spec)
        self._where = f"layer {spec.layer}"

    def __call__(
        self, hidden_states: torch.Tensor, *, position_embeddings: Any = None, **rest: Any
    ) -> tuple[torch.Tensor, None]:
        """``[1, T, hidden] -> [1, T, hidden]``; what else transformers hands over is about masks and caches of its own."""
        self._calls.turn(self._module)
        parts, fused = self._parts, self._parts.qkv.product
        cos_sin = self._angles.of(position_embeddings) if self._attention.spec.rotary_dim else None
        qkv = linear(hidden_states[0], fused.weight, fused.bias)
        out = self._attention.of_projection(qkv, self._cell.context(self._where), cos_sin, parts.q_norm, parts.k_norm)
        return parts.output(out)[None], None


Given = dict[nn.Module, dict[str, Any]]
"""Module -> its arguments by name; empty where they came in another way."""


def _given(model: TransformersModel) -> Given:
    """What the attention modules and the layers around them are handed in a pass."""
    given: Given = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given[module] = dict(kwargs) if not args else {"hidden_states": args[0], **kwargs} if len(args) == 1 else {}

    attending = set(model.calls.modules)
    around = {module for module in model.foreign.modules() if attending & set(module.children())}
    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in attending | around]
    _run_hooked(model, handles)
    return given


def _run_hooked(model: TransformersModel, handles: list[RemovableHandle]) -> None:
    """A pass of all layers over a few tokens, far positions among them, for hooks that are removed after it."""
    last = model.spec.max_position - 1
    places = torch.tensor([0, 1, 2, min(7, last), last // 3, last // 2, max(last - 1, 0), last])
    try:
        with model.calls.through(own_values(model)):
            run(model, torch.zeros(_TOKENS, dtype=torch.int64), places)
    finally:
        for handle in handles:
            handle.remove()


def _as_attentions(model: TransformersModel, norms: Mapping[nn.Module, Norm], given: Given) -> dict[nn.Module, SelfAttention]:
    """The attention modules that are of the usual kind, each with what takes its place."""
    modules, found = model.calls.modules, {}
    for index, (module, spec) in enumerate(zip(modules, model.spec.layers, strict=True)):
        parts = None if modules.count(module) > 1 else _parts(module, spec, norms, model.dtype)
        if parts is not None:
            rotary_dim = _rotation(model, index, parts, given[module])
            if rotary_dim is not None:
                turned = dataclasses.replace(spec, rotary_dim=rotary_dim)
                found[module] = SelfAttention(model, index, turned, parts, model.angles)
    return found


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


def _rotation(model: TransformersModel, index: int, parts: _Parts, given: dict[str, Any]) -> int | None:
    """How many channels the module rotates, if it computes what ours would; None: it does not."""
    if "hidden_states" not in given:
        return None
    module, spec, weight = model.calls.modules[index], model.spec.layers[index], parts.qkv.weight
    handed: list[torch.Tensor] = []
    own = own_values(model)

    def note(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        handed.extend(TRANSFORMERS.pack(x, "x", "") for x in (q, k, v))
        return own(layer, q, k, v, arguments)

    # Large enough for clamps to be met.
    hidden = _draw(weight, 1, _TOKENS, weight.shape[1], size=30.0)
    with model.calls.through(note), model.calls.at(index):
        try:
            result = module(**given | {"hidden_states": hidden})
        except Exception:
            return None
    if not isinstance(result, tuple) or len(result) != 2 or result[1] is not None:
        return None
    q, k, v = torch.split(linear(hidden[0], parts.qkv.product.weight, parts.qkv.product.bias), parts.qkv.product.rows, dim=-1)
    q, k = q.view(_TOKENS, -1, spec.head_dim), k.view(_TOKENS, -1, spec.head_dim)
    v = v.view(_TOKENS, -1, spec.v_head_dim)
    if parts.q_norm is not None and parts.k_norm is not None:
        q, k = parts.q_norm(q), parts.k_norm(k)
    projected = parts.output(v.repeat_interleave(spec.group_size, dim=1).flatten(1))[None]
    if not _alike(v, handed[2]) or not _alike(projected, result[0]):
        return None
    if _alike(q, handed[0]) and _alike(k, handed[1]):
        return 0
    embeddings: Any = given.get("position_embeddings")
    if not _is_pair(embeddings):
        return None
    rotary_dim: int = embeddings[0].shape[-1]
    if rotary_dim > spec.head_dim or rotary_dim % 2:
        return None
    turned = rotate_twin(q, k, Angles().of(embeddings), rotary_dim)
    return rotary_dim if _alike(turned[0], handed[0]) and _alike(turned[1], handed[1]) else None


def _is_pair(embeddings: Any) -> bool:
    return (
        isinstance(embeddings, tuple)
        and len(embeddings) == 2
        and all(isinstance(part, torch.Tensor) and part.dim() == 3 and part.shape[:2] == (1, _TOKENS) for part in embeddings)
        and embeddings[0].shape == embeddings[1].shape
    )


# Layers


class PreNormLayer:
    """``x + attention(norm(x))``, and then ``x + mlp(norm(x))``: each sum is one kernel with the norm after it."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, before: Norm, between: Norm) -> None:
        self._attention = attention
        self._mlp = mlp
        self._before = before
        self._between = between
        self.after: Norm | None = None
        """Takes this layer's output as it is: the next layer's first norm, or the model's last."""

    def __call__(self, hidden_states: torch.Tensor, **rest: Any) -> torch.Tensor:
        mixed = self._attention(hidden_states=self._before(hidden_states), **rest)[0]
        normed, total = add_rms_norm(mixed, hidden_states, self._between.weight, self._between.eps)
        out: torch.Tensor = self._mlp(normed)
        return total + out if self.after is None else self.after.of_sum(out, total)


def _as_layers(model: TransformersModel, norms: Mapping[nn.Module, Norm], given: Given) -> dict[nn.Module, PreNormLayer]:
    """The layers that are nothing but this, each with what takes its place."""
    found: dict[nn.Module, PreNormLayer] = {}
    for layer in given:
        children = dict(layer.named_children())
        attending = [child for child in children.values() if child in model.calls.modules]
        own_norms = [norms[child] for child in children.values() if child in norms]
        others = [child for child in children.values() if child not in norms and child not in attending]
        named = given[layer]
        if len(attending) != 1 or len(own_norms) != 2 or len(others) != 1 or "hidden_states" not in named:
            continue
        index = model.calls.modules.index(attending[0])
        for before, between in (own_norms, own_norms[::-1]):
            ours = PreNormLayer(attending[0], others[0], before, between)
            # Small, so that what the layer adds to them outweighs them, whatever it is multiplied by.
            arguments = named | {"hidden_states": _draw(named["hidden_states"], *named["hidden_states"].shape, size=0.01)}
            with model.calls.through(own_values(model)):
                try:
                    with model.calls.at(index):
                        theirs = layer(**arguments)
                    with model.calls.at(index):
                        result = ours(**arguments)
                except Exception:
                    break
            if _alike(result, theirs):
                found[layer] = ours
                break
    return found


def _followers(
    model: TransformersModel, norms: Mapping[nn.Module, Norm], layers: Mapping[nn.Module, PreNormLayer]
) -> dict[nn.Module, Norm]:
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
