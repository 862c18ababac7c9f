"""Which backend runs a layer, and why. Backends register here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.attention.backend import AttentionBackend, Replanned
from headrace.attention.flashinfer.attention import FlashInferAttention, FlashInferLatent, FlashInferPrompts
from headrace.attention.flashinfer.kernels import Compiling, Kernel, compile_ahead
from headrace.attention.latent import LatentBackend, ReplannedLatentBackend
from headrace.attention.native import NativeAttention
from headrace.attention.reference import ReferenceAttention
from headrace.attention.torch_cpu import TorchAttention
from headrace.attention.triton import InvariantAttention, TritonAttention
from headrace.errors import ConfigError
from headrace.spec import AttentionSpec

_BACKENDS: dict[str, type[AttentionBackend]] = {}
"""By name, the most preferred first: ``auto`` takes the first that supports the layer."""


def register(backend: type[AttentionBackend], before: str | None = None) -> None:
    """Adds a backend: the least preferred one, or the one preferred to ``before``.

    Raises:
        ValueError: the name is taken, or there is no backend ``before``.
    """
    if backend.name in _BACKENDS:
        raise ValueError(f"an attention backend named {backend.name} is registered already")
    order = list(_BACKENDS.items())
    place = len(order) if before is None else [name for name, _ in order].index(before)
    order.insert(place, (backend.name, backend))
    _BACKENDS.clear()
    _BACKENDS.update(order)


def names() -> list[str]:
    """Every registered backend, the most preferred first."""
    return list(_BACKENDS)


def refusals(spec: AttentionSpec, device: str, dtype: str, kv_dtype: str | None = None) -> dict[str, list[str]]:
    """Per backend, why it cannot run the layer; an empty list: it can."""
    return {name: _backend(name, spec).supports(spec, device, dtype, "dense", kv_dtype) for name in _BACKENDS}


def choose(
    spec: AttentionSpec, device: str, dtype: str, requested: str = "auto", kv_dtype: str | None = None
) -> tuple[str, str]:
    """The backend for a layer.

    Args:
        requested: a backend's name, or ``auto``.
        kv_dtype: of the KV cache; None: as ``dtype``.

    Returns:
        Its name, and why it was chosen.

    Raises:
        ConfigError: there is no such backend, or none that can run the layer; says why each cannot.
    """
    if requested != "auto":
        reasons = _backend(requested, spec).supports(spec, device, dtype, "dense", kv_dtype)
        if reasons:
            raise ConfigError(
                f"layer {spec.layer}: attention backend {requested} cannot run it: {'; '.join(reasons)}", "attention_backend"
            )
        return requested, _with_work("asked for", requested, spec)
    passed: list[str] = []
    for name, reasons in refusals(spec, device, dtype, kv_dtype).items():
        if not reasons:
            why = f"not {', not '.join(passed)}" if passed else f"the fastest that runs on {device}"
            return name, _with_work(why, name, spec)
        passed.append(f"{name} ({'; '.join(reasons)})")
    raise ConfigError(f"layer {spec.layer}: no attention backend can run it: {', '.join(passed)}", "attention_backend")


def _with_work(reason: str, name: str, spec: AttentionSpec) -> str:
    """The reason, and where several kernels share a backend's work which does what."""
    does = getattr(_backend(name, spec), "does", "")
    return f"{reason}; {does}" if does else reason


def create(name: str) -> AttentionBackend:
    """A new instance. One serves all layers that chose it.

    Raises:
        ConfigError: there is no such backend.
    """
    return _backend(name)()


def begin_compiling(specs: Sequence[AttentionSpec], names: Sequence[str], device: str, dtype: str) -> list[Compiling]:
    """Begins to build what the layers will want of FlashInfer; nothing waits for it.

    Args:
        names: chosen for each layer.
    """
    wanted: list[Kernel] = []
    for spec, name in zip(specs, names, strict=True):
        asked = [(spec, name)]
        prompts = None if spec.latent is None else for_prompts(spec, name, device, dtype)
        if prompts is not None:
            asked.append((spec.uncompressed, prompts))
        for each, chosen in asked:
            backend = _backend(chosen, each)
            if issubclass(backend, FlashInferPrompts | FlashInferLatent):
                wanted += backend.wants(each, getattr(torch, dtype), torch.device(device))
    return compile_ahead(wanted)


def create_for(specs: Sequence[AttentionSpec], names: Sequence[str], device: str, dtype: str) -> list[AttentionBackend]:
    """The backend of each layer: one instance of a name, and one of each geometry of compressed KV.

    Args:
        names: chosen for each layer.

    Raises:
        ConfigError: there is no such backend, or none that can run a layer's uncompressed prompts.
    """
    made: dict[object, AttentionBackend] = {}
    backends = []
    for spec, name in zip(specs, names, strict=True):
        key = (name, spec.latent, spec.num_heads, spec.v_head_dim, spec.rotary_dim) if spec.latent is not None else name
        if key not in made:
            made[key] = create(name) if spec.latent is None else _latent(spec, name, device, dtype)
        backends.append(made[key])
    return backends


def _latent(spec: AttentionSpec, name: str, device: str, dtype: str) -> AttentionBackend:
    prompts = for_prompts(spec, name, device, dtype)
    absorbed = _backend(name, spec)()
    kind = ReplannedLatentBackend if isinstance(absorbed, Replanned) else LatentBackend
    return kind(spec, absorbed, None if prompts is None else _backend(prompts))


def for_prompts(spec: AttentionSpec, name: str, device: str, dtype: str) -> str | None:
    """Which backend attends over the uncompressed KV of a layer that keeps compressed KV and for which ``name`` was chosen.

    It is the most preferred one, or that of ``name`` where that is the oracle, or FlashInfer's and can. None: prompts are
    absorbed too, for what a token comes to must not depend on how much of its prompt is in the step.

    Raises:
        ConfigError: none can.
    """
    if name == InvariantAttention.name:
        return None
    full = spec.uncompressed
    asked = name == ReferenceAttention.name
    asked |= name == FlashInferAttention.name and not FlashInferAttention.supports(full, device, dtype)
    return choose(full, device, dtype, name if asked else "auto")[0]


def _backend(name: str, spec: AttentionSpec | None = None) -> type[AttentionBackend]:
    """What goes by a name; some have another class for compressed KV."""
    if name not in _BACKENDS:
        raise ConfigError(f"there is no attention backend {name!r}; there are: {', '.join(_BACKENDS)}", "attention_backend")
    found = _BACKENDS[name]
    return getattr(found, "for_latent", found) if spec is not None and spec.latent is not None else found


register(NativeAttention)
register(TorchAttention)
register(FlashInferPrompts)
register(TritonAttention)
register(ReferenceAttention)
# Never the fastest, but there for the asking: the one where outputs must not depend on the batch, the other, measured
# behind our own decode kernel, to compare with and to fall back to.
register(InvariantAttention)
register(FlashInferAttention)
