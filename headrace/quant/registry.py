"""The quantizations: what ``--quantization`` may name, and how each holds the weights on each type of device."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from headrace.errors import ConfigError
from headrace.kernels.linear.fp8_reference import GROUP
from headrace.layers.stored import ScaleGroup
from headrace.model_spec import MoeSpec
from headrace.quant.candidates import Candidate, EngineFacts, Limit
from headrace.quant.experts import ExpertsCandidate, KeepExperts, RoundExperts
from headrace.quant.formats.find import method_name
from headrace.quant.formats.scheme import Scheme
from headrace.quant.fp8 import KEEP_FP8, Fp8BlockMethod, Fp8Method, round_to_fp8
from headrace.quant.groups import GROUP as INTEGER_GROUP
from headrace.quant.integers import KeepNative, NativeIntegers, TorchIntegers, integers_of_file
from headrace.quant.native_experts import KeepNativeExperts, RoundNativeExperts

STORED = "stored"
"""The quantization that keeps what a checkpoint stores, where kernels multiply it. Users name it with ``auto``."""
_SCALES = 4 / INTEGER_GROUP
"""Most bytes that the scales of a weight take."""
_DEVICES = {"cpu": "CPU", "cuda": "GPU"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantization:
    """Declares how the matrices of a native model are held."""

    name: str
    candidates: Mapping[str, tuple[Candidate, ...]]
    """Type of device -> candidates for its matrices, in order of preference."""
    experts: Mapping[str, tuple[ExpertsCandidate, ...]] = dataclasses.field(default_factory=dict)
    """The same for the experts of mixtures. Those that none holds stay floats."""
    floats: bool
    """Whether matrices that no candidate holds stay floats; they are refused otherwise."""
    packs_head: bool
    """Whether ``auto`` holds the output head so too; it stays floats otherwise."""
    copies: bool
    """Whether floats may be kept beside the packed weights."""
    replaces: bool
    """Whether it may be asked for where the checkpoint is quantised in another way."""
    group: ScaleGroup | None = None
    """Numbers that share a scale in a checkpoint that its name describes; None: any."""
    nbytes: float
    """Most bytes of a weight, with its scales."""
    head_nbytes: float = 1 + _SCALES
    """Most bytes of a weight of the output head, where it is packed."""
    dtype: str | None = None
    """The dtype of activations with which its kernels are fastest, which ``auto`` takes; None: any."""
    stored: str
    """The fate of a quantised checkpoint's matrices, for reports."""


def _integers(bits: int) -> Quantization:
    return Quantization(
        name=f"int{bits}",
        candidates={"cpu": (NativeIntegers(bits), TorchIntegers(bits))},
        experts={"cpu": (KeepNativeExperts(), RoundNativeExperts(bits))},
        floats=False,
        packs_head=True,
        copies=True,
        replaces=True,
        nbytes=bits / 8 + _SCALES,
        dtype="bfloat16",
        stored=f"packed as int{bits}",
    )


def _fp8(name: str, method: type[Fp8Method] | None) -> Quantization:
    """``method``: to which floats are rounded; None: they stay floats."""
    candidates = (KEEP_FP8,) if method is None else (KEEP_FP8, round_to_fp8(method))
    experts: tuple[ExpertsCandidate, ...] = (KeepExperts(),)
    if method is not None:
        experts = (KeepExperts(), RoundExperts(blocks=method is Fp8BlockMethod))
    return Quantization(
        name=name,
        # CPUs round activations to FP8 too where it is asked for, so that tests can.
        candidates={"cuda": candidates, "cpu": (KeepNative(),) if method is None else candidates},
        experts={"cuda": experts, "cpu": (KeepNativeExperts(),) if method is None else experts},
        floats=True,
        # A checkpoint that has codes for the head means them.
        packs_head=method is None,
        copies=False,
        replaces=False,
        group=(GROUP, GROUP) if method is Fp8BlockMethod else None,
        # Integers of a checkpoint may have zero points beside their scales.
        nbytes=1 + (2 if method is None else 1) * _SCALES,
        stored="multiplied as they are stored where a kernel can" if method is None else f"packed as {name}",
    )


QUANTIZATIONS: Mapping[str, Quantization] = {
    each.name: each
    for each in (
        _integers(8),
        _integers(4),
        _fp8("fp8", Fp8Method),
        _fp8("fp8_per_block", Fp8BlockMethod),
        _fp8(STORED, None),
    )
}
"""Each by its name. The first that serves a type of device is named to those who ask for one that does not."""


def find(name: str) -> Quantization:
    """Returns the quantization of this name. Raises ConfigError for any other than those of ``EngineConfig``."""
    if name not in QUANTIZATIONS:
        raise ConfigError(f"quantization must be one of none, {', '.join(QUANTIZATIONS)}, not {name!r}", "quantization")
    return QUANTIZATIONS[name]


_SAME = {"fp8_per_channel": "fp8"}
"""Names of a quantization that others call otherwise."""


def meaning(word: str, stored: Scheme | None, gguf: bool) -> str:
    """Returns the quantization that a user's word asks for, none, or auto, which a name of the checkpoint's own format means.

    Args:
        stored: the number formats of a quantised checkpoint; None: it has floats, or is a GGUF file.
        gguf: whether it is one.

    Raises:
        ConfigError: the checkpoint is of another format.
    """
    name = _SAME.get(word, word)
    if name in ("none", "auto") or (name in QUANTIZATIONS and (stored is None or QUANTIZATIONS[name].replaces)):
        return name
    if name in QUANTIZATIONS and stored is not None:
        quantization = QUANTIZATIONS[name]
        keeps = frozenset().union(*(each.keeps for some in quantization.candidates.values() for each in some))
        specs = [rule.format.spec for rule in stored.rules if rule.format is not None]
        agrees = all(spec.codes in keeps and quantization.group in (None, spec.group) for spec in specs)
    else:
        agrees = gguf if name == "gguf" else stored is not None and stored.method == method_name(name)
    if agrees:
        return "auto"
    found = "a GGUF file" if gguf else "not quantised" if stored is None else f"quantised as {stored}"
    raise ConfigError(
        f"quantization {word}: the checkpoint is {found}; leave the option out to take it as it is", "quantization"
    )


def head_quantization(asked: str, quantization: str) -> str:
    """Returns the quantization of the output head, or none.

    Args:
        asked: ``quantize_head``.
        quantization: of the other matrices.
    """
    if asked != "auto":
        return asked
    return quantization if quantization != "none" and find(quantization).packs_head else "none"


def head_refusal(name: str, engine: EngineFacts) -> str | None:
    """Returns why an engine cannot have its output head so; None: it can."""
    if limit := refusal(name, engine):
        return limit.reason
    shape = engine.model.hidden_size, engine.model.head_rows, engine.device
    # Those that keep a checkpoint's codes have nothing to keep of floats.
    rounding = [candidate for candidate in find(name).candidates[engine.device] if not candidate.keeps]
    reasons = [candidate.supports(*shape) for candidate in rounding]
    return reasons[0][0] if all(reasons) else None


def refusal(name: str, engine: EngineFacts) -> Limit | None:
    """Returns why an engine cannot have the quantization that was asked for; None: it can."""
    quantization = find(name)
    candidates = quantization.candidates.get(engine.device)
    if candidates is None:
        theirs = " and ".join(f"{_DEVICES[device]}s" for device in quantization.candidates)
        instead = next(each.name for each in QUANTIZATIONS.values() if engine.device in each.candidates)
        return Limit(f"it is for {theirs}: write {instead} on a {_DEVICES[engine.device]}")
    limits = {candidate: candidate.limits(engine) for candidate in candidates}
    usable = [candidate for candidate, found in limits.items() if not found]
    if not usable:
        first = [found[0] for found in limits.values()]
        return Limit("; ".join(dict.fromkeys(limit.reason for limit in first)), first[0].param)
    if quantization.floats:
        return None
    for outputs, inputs in engine.matrices:
        reasons = [candidate.supports(inputs, outputs, engine.device) for candidate in usable]
        if all(reasons):
            return Limit(f"no packed kernel fits this model: a matrix has {reasons[0][0]}")
    return None


def _kept(candidates: Sequence[Candidate]) -> frozenset[str]:
    return frozenset[str]().union(*(candidate.keeps for candidate in candidates))


def automatic(engine: EngineFacts, types: Counter[str] | None, stored: Scheme | None) -> tuple[str, str]:
    """Chooses the quantization of a native model where the user leaves it open.

    Args:
        types: the matrices of a GGUF file by type; None: it is none.
        stored: the number formats of another quantised checkpoint; None: it has floats.

    Returns:
        Its name, or none; and why.
    """
    if engine.device == "cpu" and stored is None:
        bits, why = integers_of_file(engine, types)
        limit = refusal(f"int{bits}", engine) if bits else None
        if limit is not None:
            return "none", limit.reason
        return (f"int{bits}" if bits else "none"), why
    codes = {rule.format.spec.codes for rule in stored.rules if rule.format is not None} if stored is not None else set()
    candidates = QUANTIZATIONS[STORED].candidates[engine.device]
    wanted = [candidate for candidate in candidates if candidate.keeps & codes]
    kept = _kept(wanted)
    if any(isinstance(mlp, MoeSpec) for mlp in engine.model.mlps):
        kept = kept.union(*(candidate.keeps for candidate in QUANTIZATIONS[STORED].experts[engine.device]))
    if not codes or codes - kept:
        theirs = " or ".join(candidate.title for candidate in candidates)
        return "none", f"the checkpoint is not of {theirs}, which kernels here multiply: weights are made {engine.dtype}"
    title = " and ".join((*(candidate.title for candidate in wanted), *sorted(codes - _kept(wanted))))
    for limit in (limit for candidate in wanted for limit in candidate.limits(engine)):
        return "none", f"the checkpoint is of {title}, and weights are made {engine.dtype}: {limit.reason}"
    return STORED, f"the checkpoint is of {title}, which the {_DEVICES[engine.device]} multiplies"
