"""Choice of the backends of a layer's decode rows and prefill rows, with reasons. Backends register here and nowhere else."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from headrace.attention.backend import NO_MODES, VISIBLE_ENDS, AttentionBackend, Modes, Scratch
from headrace.attention.compiled import Buildable, CompiledBackend, Compiling, start_compiling
from headrace.attention.compose import ByRowClass, WithVisibleEnds
from headrace.attention.cudnn import CudnnPrefill
from headrace.attention.flashinfer.attention import (
    FlashInferBackend,
    FlashInferCapturedPrefill,
    FlashInferDecode,
    FlashInferMLA,
    FlashInferPrefill,
)
from headrace.attention.indexed import WithIndexer, rule_of
from headrace.attention.mla import MLABackend
from headrace.attention.native import NativeAttention
from headrace.attention.reference import ReferenceAttention
from headrace.attention.sparse import SparsePrefillAttention, WithSparsePrompts
from headrace.attention.torch_cpu import TorchAttention
from headrace.attention.triton import InvariantAttention, TritonAttention
from headrace.config import SparseConfig
from headrace.errors import ConfigError
from headrace.kernels.indexer import ChoiceRule
from headrace.model_spec import AttentionSpec, ModelFacts


@dataclasses.dataclass(frozen=True)
class Entry:
    """A registered name: a backend for each row class, or one for both."""

    name: str
    decode: type[AttentionBackend]
    prefill: type[AttentionBackend]
    does: str = ""
    """Rows that each kernel runs, where there are several kernels."""
    eager_decode: bool = False
    """See ``ByRowClass``."""

    @property
    def parts(self) -> list[type[AttentionBackend]]:
        return [self.decode] if self.decode is self.prefill else [self.decode, self.prefill]

    def refusals(self, spec: AttentionSpec, device: str, dtype: str, kv_dtype: str | None, modes: Modes) -> list[str]:
        """Distinct reasons of all parts."""
        parts: list[type[AttentionBackend]] = self.parts if spec.mla is None else [*self.parts, MLABackend]
        return list(dict.fromkeys(why for part in parts for why in part.supports(spec, device, dtype, kv_dtype, modes)))

    def create(self) -> AttentionBackend:
        scratch = Scratch()
        parts = [part(scratch) for part in self.parts]
        return ByRowClass(self.name, *parts, eager_decode=self.eager_decode) if len(parts) > 1 else parts[0]


class BackendChoice(NamedTuple):
    """The backend of a layer."""

    name: str
    """Name in ``--attention-backend``."""
    why: str
    does: str
    """Rows that each kernel runs, where there are several kernels."""
    decode: str
    prefill: str
    """Backends of decode rows and of prefill rows."""

    @property
    def reason(self) -> str:
        """Reason for the choice, and the rows that each kernel runs."""
        return f"{self.why}; {self.does}" if self.does else self.why


_ENTRIES: dict[str, Entry] = {}
"""Registered backends by name, the most preferred first: ``auto`` takes the first that supports the layer."""
_MLA_ENTRIES: dict[str, Entry] = {}
"""Overrides of ``_ENTRIES`` for MLA layers."""


def register(
    decode: type[AttentionBackend],
    prefill: type[AttentionBackend] | None = None,
    *,
    name: str | None = None,
    does: str = "",
    before: str | None = None,
) -> None:
    """Adds a backend: the least preferred one, or the one preferred to ``before``.

    Args:
        decode: for decode rows, and for captured steps as a whole where ``prefill`` is not ``capturable``.
        prefill: for prefill rows; None: as ``decode``.
        name: of the two together; None: the name of ``decode``.
        does: which of the two runs which rows, for reports.

    Raises:
        ValueError: the name is taken, or there is no backend ``before``.
    """
    entry = Entry(name or decode.name, decode, prefill or decode, does)
    if entry.name in _ENTRIES:
        raise ValueError(f"an attention backend named {entry.name} is registered already")
    order = list(_ENTRIES.values())
    place = len(order) if before is None else [each.name for each in order].index(before)
    order.insert(place, entry)
    _ENTRIES.clear()
    _ENTRIES.update({each.name: each for each in order})


def modes_of(model: ModelFacts) -> Modes:
    """Modes that all layers of a model need."""
    return frozenset({VISIBLE_ENDS}) if model.vision is not None and model.vision.bidirectional else NO_MODES


def names() -> list[str]:
    """Every registered backend, the most preferred first."""
    return list(_ENTRIES)


def refusals(
    spec: AttentionSpec, device: str, dtype: str, kv_dtype: str | None = None, modes: Modes = NO_MODES
) -> dict[str, list[str]]:
    """Reasons per backend why it cannot run the layer; empty: it can."""
    return {name: _entry(name, spec).refusals(spec, device, dtype, kv_dtype, modes) for name in _ENTRIES}


def choose(
    spec: AttentionSpec, device: str, dtype: str, kv_dtype: str | None = None, modes: Modes = NO_MODES, requested: str = "auto"
) -> BackendChoice:
    """The backend for a layer.

    Args:
        kv_dtype: of the KV cache; None: as ``dtype``.
        modes: what some steps need beyond dense causal attention. The backend need not support them: see ``for_modes``.
        requested: a backend's name, or ``auto``.

    Raises:
        ConfigError: there is no such backend, or none that can run the layer; says why each cannot.
    """
    choice = _first(spec, device, dtype, kv_dtype, NO_MODES, requested)
    other = for_modes(spec, choice.name, device, dtype, kv_dtype, modes)
    if other is None:
        return choice
    return choice._replace(does="; ".join(filter(None, (choice.does, f"steps with {', '.join(sorted(modes))} by {other}"))))


def for_modes(
    spec: AttentionSpec, name: str, device: str, dtype: str, kv_dtype: str | None = None, modes: Modes = NO_MODES
) -> str | None:
    """The backend of the steps that need ``modes``, for a layer that uses backend ``name`` otherwise. None: it runs them too.

    Raises:
        ConfigError: no backend supports them.
    """
    if not modes or not _entry(name, spec).refusals(spec, device, dtype, kv_dtype, modes):
        return None
    return _first(spec, device, dtype, kv_dtype, modes, "auto").name


def _first(spec: AttentionSpec, device: str, dtype: str, kv_dtype: str | None, modes: Modes, requested: str) -> BackendChoice:
    """The most preferred backend that supports everything, or the one requested. Raises ConfigError."""
    if requested != "auto":
        reasons = _entry(requested, spec).refusals(spec, device, dtype, kv_dtype, modes)
        if reasons:
            raise ConfigError(
                f"layer {spec.layer}: attention backend {requested} cannot run it: {'; '.join(reasons)}", "attention_backend"
            )
        return _choice(requested, "asked for", spec, device, dtype)
    passed: list[str] = []
    for name, reasons in refusals(spec, device, dtype, kv_dtype, modes).items():
        if not reasons:
            why = f"not {', not '.join(passed)}" if passed else f"the fastest that runs on {device}"
            return _choice(name, why, spec, device, dtype)
        passed.append(f"{name} ({'; '.join(reasons)})")
    raise ConfigError(f"layer {spec.layer}: no attention backend can run it: {', '.join(passed)}", "attention_backend")


def _choice(name: str, why: str, spec: AttentionSpec, device: str, dtype: str) -> BackendChoice:
    entry = _entry(name, spec)
    does, prefill = entry.does, entry.prefill.name
    if spec.mla is not None:
        prompts = for_prompts(spec, name, device, dtype)
        when = f"uncompressed, for {prompts}, where that is less work" if prompts else "absorbed as decode rows are"
        does, prefill = "; ".join(filter(None, (does, f"prompts are {when}"))), prompts or prefill
    if spec.indexer is not None:
        chosen = f"rows of more than {spec.indexer.reach:,} tokens attend to {spec.indexer.words}"
        does = "; ".join(filter(None, (does, chosen)))
    return BackendChoice(name, why, does, entry.decode.name, prefill)


def create(name: str) -> AttentionBackend:
    """Creates an instance, which serves all layers of that backend.

    Raises:
        ConfigError: there is no such backend.
    """
    return _entry(name).create()


def begin_compiling(specs: Sequence[AttentionSpec], names: Sequence[str], device: str, dtype: str) -> list[Compiling]:
    """Starts compiling the kernels of other libraries for the layers; does not wait.

    Args:
        names: the backend of each layer.
    """
    wanted: list[Buildable] = []
    for spec, name in zip(specs, names, strict=True):
        layers = [(spec, _entry(name, spec))]
        prompts = None if spec.mla is None else for_prompts(spec, name, device, dtype)
        if prompts is not None:
            layers.append((spec.uncompressed, _entry(prompts)))
        for each, entry in layers:
            for part in entry.parts:
                if issubclass(part, CompiledBackend):
                    wanted += part.wants(each, getattr(torch, dtype), torch.device(device))
    return start_compiling(wanted)


def create_for(
    specs: Sequence[AttentionSpec],
    names: Sequence[str],
    device: str,
    dtype: str,
    sparse: SparseConfig | None = None,
    *,
    kv_dtype: str | None = None,
    modes: Modes = NO_MODES,
) -> list[AttentionBackend]:
    """Creates the backend of each layer: one instance per name, and one per MLA geometry.

    Args:
        names: the backend of each layer.
        modes: what some steps need; each layer gets a second backend for them where its own lacks one.
        sparse: how prompts attend in the layers that can attend sparsely; None: all attend densely.

    Raises:
        ConfigError: there is no such backend, or none that can run a layer's uncompressed prompts.
    """
    by_key: dict[object, AttentionBackend] = {}
    backends = []
    prompts = None if sparse is None else SparsePrefillAttention(sparse)
    for spec, name in zip(specs, names, strict=True):
        wraps = prompts is not None and sparse is not None and sparse.heads[spec.layer] > 0
        # An instance plans one set of rows a step: layers that attend sparsely have their own.
        other = for_modes(spec, name, device, dtype, kv_dtype, modes)
        key: object = (name, other, wraps, _rule(spec))
        if spec.mla is not None:
            key = (name, spec.mla, spec.num_heads, spec.v_head_dim, spec.rotary_dim, _rule(spec))
        if key not in by_key:
            usual = create(name) if spec.mla is None else _mla(spec, name, device, dtype)
            if other is not None:
                usual = WithVisibleEnds(usual, create(other))
            if spec.indexer is not None and spec.mla is None:
                usual = WithIndexer(usual, spec, invariant=name == InvariantAttention.name)
            by_key[key] = WithSparsePrompts(usual, prompts) if wraps and prompts is not None else usual
        backends.append(by_key[key])
    return backends


def _rule(spec: AttentionSpec) -> ChoiceRule | None:
    """Returns the rule of the layer's indexer: layers with one rule share the rows for which indexers choose."""
    return None if spec.indexer is None else rule_of(spec.indexer)


def _mla(spec: AttentionSpec, name: str, device: str, dtype: str) -> AttentionBackend:
    prompts = for_prompts(spec, name, device, dtype)
    return MLABackend(spec, _entry(name, spec).create(), None if prompts is None else _entry(prompts).create)


def for_prompts(spec: AttentionSpec, name: str, device: str, dtype: str) -> str | None:
    """Chooses the backend for the uncompressed prompts of an MLA layer that uses backend ``name``.

    It is ``name`` itself for the reference, and for FlashInfer if it supports the geometry; else the most preferred one. None:
    prompts are absorbed too, because a batch-invariant token must not depend on how much of its prompt is in the step.

    Raises:
        ConfigError: no backend supports the geometry.
    """
    if name == InvariantAttention.name:
        return None
    full = spec.uncompressed
    keeps_name = name == ReferenceAttention.name
    keeps_name |= name == FlashInferBackend.name and not _ENTRIES[name].refusals(full, device, dtype, None, NO_MODES)
    return choose(full, device, dtype, requested=name if keeps_name else "auto").name


def _entry(name: str, spec: AttentionSpec | None = None) -> Entry:
    """The entry of a name, for a layer."""
    if name not in _ENTRIES:
        raise ConfigError(f"there is no attention backend {name!r}; there are: {', '.join(_ENTRIES)}", "attention_backend")
    return _ENTRIES[name] if spec is None or spec.mla is None else _MLA_ENTRIES.get(name, _ENTRIES[name])


register(NativeAttention)
register(TorchAttention)
register(
    TritonAttention,
    CudnnPrefill,
    name="cudnn+triton",
    does="long prompts by cuDNN, other rows and CUDA graphs by headrace's kernel",
)
register(
    TritonAttention,
    FlashInferPrefill,
    name="flashinfer+triton",
    does="prompts by FlashInfer, decode rows and CUDA graphs by headrace's kernel, which reads KV faster",
)
register(TritonAttention)
register(ReferenceAttention)
# Only on request: one for batch-invariant outputs; the other, slower in decode than our own kernel, for comparison and as a
# fallback.
register(InvariantAttention)
register(FlashInferDecode, FlashInferCapturedPrefill, does="prompts, decode rows and CUDA graphs by FlashInfer")
# The launch of the MLA kernel depends on the average number of queries per row, which a capture would freeze.
_MLA_ENTRIES["flashinfer"] = Entry(
    "flashinfer",
    FlashInferMLA,
    TritonAttention,
    "FlashInfer's MLA kernel for absorbed rows, but for prompts within a graph",
    eager_decode=True,
)
