"""The quantizations: what ``--quantization`` may name, and how each holds the weights on each type of device."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from headrace.errors import ConfigError
from headrace.kernels.linear.fp8_reference import GROUP
from headrace.layers.stored import ScaleGroup
from headrace.model_spec import ModelSpec
from headrace.quant.candidates import Candidate, EngineFacts, Limit
from headrace.quant.experts import ExpertsCandidate, KeepExperts, RoundExperts
from headrace.quant.formats.find import method_name
from headrace.quant.formats.gguf import INT4_TYPES, SPECS
from headrace.quant.formats.scheme import Scheme
from headrace.quant.fp8 import KEEP_FP8, Fp8BlockMethod, Fp8Method, round_to_fp8
from headrace.quant.groups import GROUP as INTEGER_GROUP
from headrace.quant.integers import KeepNative, NativeIntegers, TorchIntegers, integers_of_file
from headrace.quant.native_experts import KeepNativeExperts, RoundNativeExperts
from headrace.quant.wna16 import KEEP_INTEGERS, Int4GpuMethod, Int8GpuMethod, round_to_integers

STORED, STORED_INT4 = "stored", "stored_int4"
"""The quantizations that keep what a checkpoint stores, where kernels multiply it; the second, if all of it is held with 4
bits. Users name them with ``auto``."""
_TITLES = {STORED: "as stored", STORED_INT4: "int4 as stored"}
_SCALES = 4 / INTEGER_GROUP
"""Most bytes that the scales of a weight take."""
_ZEROS = 2 * _SCALES
"""The same with zero points or minima beside them, as integers of a checkpoint may have."""
_DEVICES = {"cpu": "CPU", "cuda": "GPU"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantization:
    """Declares how the matrices of a native model are held on one type of device."""

    name: str
    candidates: tuple[Candidate, ...]
    """Candidates for its matrices, in order of preference."""
    experts: tuple[ExpertsCandidate, ...]
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

    @property
    def rounding(self) -> list[Candidate]:
        """The candidates that hold floats; those that keep a checkpoint's codes have nothing to keep of them."""
        return [candidate for candidate in self.candidates if not candidate.keeps]

    @property
    def packs_experts(self) -> bool:
        """Whether experts are held so too: rounded as matrices are, or kept where nothing is rounded."""
        return any(bool(candidate.keeps) != bool(self.rounding) for candidate in self.experts)


def _cpu_integers(bits: int) -> Quantization:
    return Quantization(
        name=f"int{bits}",
        candidates=(NativeIntegers(bits), TorchIntegers(bits)),
        experts=(KeepNativeExperts(), RoundNativeExperts(bits)),
        floats=False,
        packs_head=True,
        copies=True,
        replaces=True,
        nbytes=bits / 8 + _SCALES,
        dtype="bfloat16",
        stored=f"packed as int{bits}",
    )


def _gpu_integers(method: type[Int4GpuMethod]) -> Quantization:
    return Quantization(
        name=f"int{method.bits}",
        candidates=(KEEP_INTEGERS, round_to_integers(method)),
        experts=(KeepExperts(),),
        floats=True,
        packs_head=False,
        copies=False,
        replaces=True,
        nbytes=method.bits / 8 + _ZEROS,
        head_nbytes=method.bits / 8 + _ZEROS,
        stored=f"packed as int{method.bits}",
    )


def _fp8(name: str, method: type[Fp8Method]) -> Quantization:
    """``method``: to which floats are rounded."""
    return Quantization(
        name=name,
        candidates=(KEEP_FP8, round_to_fp8(method)),
        experts=(KeepExperts(), RoundExperts(blocks=method is Fp8BlockMethod)),
        floats=True,
        packs_head=False,
        copies=False,
        replaces=False,
        group=(GROUP, GROUP) if method is Fp8BlockMethod else None,
        nbytes=1 + _SCALES,
        stored=f"packed as {name}",
    )


def _stored(name: str, bits: int, candidates: tuple[Candidate, ...], experts: tuple[ExpertsCandidate, ...]) -> Quantization:
    """``bits``: most of a code."""
    return Quantization(
        name=name,
        candidates=candidates,
        experts=experts,
        floats=True,
        # A checkpoint that has codes for the head means them.
        packs_head=True,
        copies=False,
        replaces=False,
        nbytes=bits / 8 + _ZEROS,
        stored="multiplied as they are stored where a kernel can",
    )


_CPU = (KeepNative(),), (KeepNativeExperts(),)
_GPU = (KEEP_FP8, KEEP_INTEGERS), (KeepExperts(),)
# CPUs round activations to FP8 too where it is asked for, so that tests can.
_FP8 = (_fp8("fp8", Fp8Method), _fp8("fp8_per_block", Fp8BlockMethod))
QUANTIZATIONS: Mapping[str, Mapping[str, Quantization]] = {
    device: {each.name: each for each in named}
    for device, named in {
        "cpu": (_cpu_integers(8), _cpu_integers(4), *_FP8, _stored(STORED, 8, *_CPU), _stored(STORED_INT4, 4, *_CPU)),
        "cuda": (
            *(_gpu_integers(Int8GpuMethod), _gpu_integers(Int4GpuMethod), *_FP8),
            *(_stored(STORED, 8, *_GPU), _stored(STORED_INT4, 4, *_GPU)),
        ),
    }.items()
}
"""Type of device -> each by its name. All have the same names."""


def title(name: str) -> str:
    """Returns the name of a quantization in reports."""
    return _TITLES.get(name, name)


def find(name: str, device: str) -> Quantization:
    """Returns the quantization of this name on a type of device. Raises ConfigError for any other name than those of
    ``EngineConfig``."""
    named = QUANTIZATIONS[device]
    if name not in named:
        raise ConfigError(f"quantization must be one of none, {', '.join(named)}, not {name!r}", "quantization")
    return named[name]


_SAME = {"fp8_per_channel": "fp8"}
"""Names of a quantization that others call otherwise."""


def meaning(word: str, stored: Scheme | None, gguf: bool, device: str) -> str:
    """Returns the quantization that a user's word asks for, none, or auto, which a name of the checkpoint's own format means.

    Args:
        stored: the number formats of a quantised checkpoint; None: it has floats, or is a GGUF file.
        gguf: whether it is one.
        device: type of the device.

    Raises:
        ConfigError: the checkpoint is of another format.
    """
    name = _SAME.get(word, word)
    quantization = QUANTIZATIONS[device].get(name)
    if name in ("none", "auto") or (quantization is not None and (stored is None or quantization.replaces)):
        return name
    if quantization is not None and stored is not None:
        keeps = _kept(quantization.candidates)
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


def head_quantization(asked: str, quantization: str, device: str) -> str:
    """Returns the quantization of the output head, or none.

    Args:
        asked: ``quantize_head``.
        quantization: of the other matrices.
        device: type of the device.
    """
    if asked != "auto":
        return asked
    return quantization if quantization != "none" and find(quantization, device).packs_head else "none"


def head_refusal(name: str, engine: EngineFacts, model: ModelSpec) -> str | None:
    """Returns why an engine cannot have its output head so; None: it can."""
    if limit := refusal(name, engine):
        return limit.reason
    shape = model.hidden_size, model.head_rows, engine.device
    reasons = [candidate.supports(*shape) for candidate in find(name, engine.device).rounding]
    return reasons[0][0] if all(reasons) else None


def refusal(name: str, engine: EngineFacts) -> Limit | None:
    """Returns why an engine cannot have the quantization that was asked for; None: it can."""
    quantization = find(name, engine.device)
    limits = {candidate: candidate.limits(engine) for candidate in quantization.rounding or quantization.candidates}
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


def _kept(candidates: Sequence[Candidate | ExpertsCandidate]) -> frozenset[str]:
    return frozenset[str]().union(*(candidate.keeps for candidate in candidates))


def automatic(engine: EngineFacts, types: Counter[str] | None, stored: Scheme | None) -> tuple[str, str]:
    """Chooses the quantization where the user leaves it open.

    Args:
        types: the matrices of a GGUF file by type; None: it is none.
        stored: the number formats of another quantised checkpoint; None: it has floats.

    Returns:
        Its name, or none; and why.
    """
    mixture = engine.mixture
    if stored is None and engine.device == "cpu":
        bits, why = integers_of_file(engine, types)
        limit = refusal(f"int{bits}", engine) if bits else None
        if limit is not None:
            return "none", limit.reason
        return (f"int{bits}" if bits else "none"), why
    codes = {rule.format.spec.codes for rule in stored.rules if rule.format is not None} if stored is not None else set()
    if types is not None and types.keys() & SPECS.keys():
        codes = {"int4" if types.keys() <= INT4_TYPES else "int8"}
    # Mixtures have MXFP4 in their experts. Other kernels than those of GPUs' experts hold it with 8 bits.
    four_bits = {"int4", "mxfp4"} if mixture and engine.device == "cuda" else {"int4"}
    name = STORED_INT4 if codes <= four_bits else STORED
    quantization = find(name, engine.device)
    of_matrices = codes - {"mxfp4"} if mixture else codes
    wanted = [candidate for candidate in quantization.candidates if candidate.keeps & of_matrices]
    kept = _kept(quantization.experts if mixture else quantization.candidates)
    if not codes or codes - kept:
        theirs = " or ".join(sorted(kept) if mixture else (candidate.title for candidate in quantization.candidates))
        return "none", f"the checkpoint is not of {theirs}, which kernels here multiply: weights are made {engine.dtype}"
    title = " and ".join((*(candidate.title for candidate in wanted), *sorted(codes - _kept(wanted))))
    for limit in (limit for candidate in wanted for limit in candidate.limits(engine)):
        return "none", f"the checkpoint is of {title}, and weights are made {engine.dtype}: {limit.reason}"
    return name, f"the checkpoint is of {title}, which the {_DEVICES[engine.device]} multiplies"
