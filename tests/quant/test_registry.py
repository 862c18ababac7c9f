"""A quantization is declared once: loading, estimates and refusals follow from the declaration."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import get_args

import pytest
import torch
from support.resolving import HOPPER, ZEN, model

from headrace.choices import Quantization as Choice
from headrace.errors import ConfigError
from headrace.layers.linear import Linear
from headrace.layers.moe import Experts
from headrace.layers.stored import StoredMatrix
from headrace.model_spec import MoeSpec
from headrace.quant.candidates import EngineFacts, Limit, Round
from headrace.quant.convert import Converter
from headrace.quant.experts import CodedExperts, ExpertsFacts, KeepExperts, RoundExperts
from headrace.quant.formats.find import _METHODS, method_name
from headrace.quant.int8 import Int8Method
from headrace.quant.packed import PackedMethod
from headrace.quant.registry import QUANTIZATIONS, STORED, STORED_INT4, find, meaning, refusal
from headrace.resolve.facts import DeviceFacts, matrices

NATIVE = dataclasses.replace(ZEN, native_kernels="avx512_vnni")
CPU = torch.device("cpu")


def facts(device: DeviceFacts, hidden: int = 64, **changes: object) -> EngineFacts:
    spec = model(hidden=hidden)
    known = EngineFacts(
        device=device.device,
        native_kernels=device.native_kernels,
        dtype="bfloat16",
        asked_dtype=False,
        deterministic=False,
        model=spec,
        matrices=tuple(matrices(spec)),
    )
    return dataclasses.replace(known, **changes)


def matrix(outputs: int, inputs: int) -> StoredMatrix:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs))
    return StoredMatrix("BF16", lambda: weight.bfloat16())


def test_users_may_name_all_but_what_is_stored() -> None:
    """Other words say the checkpoint's format, or mean one of these."""
    words = set(get_args(get_args(Choice)[0]))
    names, internal = set(QUANTIZATIONS["cpu"]), {STORED, STORED_INT4}
    assert all(set(named) == names for named in QUANTIZATIONS.values())
    assert words >= {"none", "auto", *names} - internal and not words & internal
    for word in words - {"none", "auto", "fp8_per_channel", "gguf", *names}:
        assert method_name(word) in _METHODS
    assert meaning("fp8_per_channel", None, False, "cuda") == "fp8"
    assert meaning("gguf", None, True, "cuda") == "auto"


def test_a_device_is_told_of_a_quantization_that_serves_it() -> None:
    assert refusal("int4", facts(HOPPER)) is None
    assert refusal("fp8", facts(ZEN)) == Limit("it is for GPUs: write int8 on a CPU")


def test_a_matrix_may_be_any_candidates() -> None:
    """Widths of 48 are not groups of 32, and PyTorch's int8 kernel holds them."""
    assert refusal("int8", facts(NATIVE, 48)) is None
    limit = refusal("int4", facts(NATIVE, 48))
    assert limit is not None and "48 inputs are not a multiple of 32" in limit.reason
    # The one candidate that holds them is made for another dtype.
    assert refusal("int8", facts(NATIVE, 48, dtype="float32")) is not None


def test_every_reason_of_candidates_that_the_engine_cannot_use_is_told() -> None:
    limit = refusal("int4", facts(ZEN, dtype="float16"))
    assert limit is not None
    assert "native kernels are not available" in limit.reason and "int4 kernel is made for bfloat16" in limit.reason


class Stubborn(Int8Method):
    """Holds wide layers alone, and none whose numbers are large."""

    format = "stubborn"
    multiples = 1, 64

    def load(self, layer: Linear, parts: Sequence[StoredMatrix]) -> float:
        if any(part.exact().abs().max() > 100 for part in parts):
            raise OverflowError("its numbers are large")
        return super().load(layer, parts)


def candidate(method: type[PackedMethod]) -> Round:
    return Round(by=method, to=method.format, limits_of=lambda engine: [])


@pytest.mark.parametrize("floats", [False, True])
def test_the_first_candidate_without_reasons_takes_the_layer(floats: bool) -> None:
    """The report has the reasons of those before it."""
    both = dataclasses.replace(find("int8", "cpu"), candidates=(candidate(Stubborn), candidate(Int8Method)), floats=floats)
    converter = Converter(CPU, both)
    wide, narrow, odd = (Linear(inputs, 16, dtype=torch.bfloat16, device="cpu") for inputs in (64, 48, 24))
    assert converter.convert("wide", wide, [matrix(16, 64)]).reason == "stored as BF16, rounded to stubborn"
    done = converter.convert("narrow", narrow, [matrix(16, 48)])
    assert type(narrow.method) is Int8Method
    assert done.reason == f"stored as BF16, rounded to {Int8Method.format}; 48 inputs are not a multiple of 64"
    large = torch.full((16, 64), 1000.0)
    again = Linear(64, 16, dtype=torch.bfloat16, device="cpu")
    done = converter.convert("again", again, [StoredMatrix("F32", lambda: large)])
    assert type(again.method) is Int8Method and done.reason.endswith("; its numbers are large")
    if floats:
        done = converter.convert("odd", odd, [matrix(16, 24)])
        assert done.format == "floats" and "24 inputs are not a multiple of 16" in done.reason
        assert torch.equal(odd.weight, matrix(16, 24).read())
    else:
        with pytest.raises(ConfigError, match="int8 cannot hold odd: 24 inputs are not a multiple of 64"):
            converter.convert("odd", odd, [matrix(16, 24)])


def test_floats_come_back_where_a_candidate_gave_up_and_none_follows() -> None:
    alone = dataclasses.replace(find("int8", "cpu"), candidates=(candidate(Stubborn),), floats=True)
    layer = Linear(64, 16, dtype=torch.bfloat16, device="cpu")
    done = Converter(CPU, alone).convert("x", layer, [StoredMatrix("F32", lambda: torch.full((16, 64), 1000.0))])
    assert done.format == "floats" and torch.equal(layer.weight, torch.full((16, 64), 1000.0).bfloat16())


@dataclasses.dataclass(frozen=True)
class Picky(RoundExperts):
    """Holds experts of wide tokens alone."""

    def misfits(self, facts: ExpertsFacts) -> list[str]:
        return [] if facts.hidden_size >= 64 else [f"{facts.hidden_size} inputs are few"]


@pytest.mark.parametrize(("hidden", "shared", "against"), [(64, "blocks", ""), (32, "output", "; 32 inputs are few")])
def test_experts_walk_alike(hidden: int, shared: str, against: str) -> None:
    named = dataclasses.replace(find("fp8", "cpu"), experts=(KeepExperts(), Picky(blocks=True), RoundExperts(blocks=False)))
    spec = MoeSpec(num_experts=4, top_k=2, intermediate_size=64)

    def layer() -> Experts:
        return Experts(hidden, spec, dtype=torch.bfloat16, device="cpu")

    stored = {"gate_up_proj": [matrix(64, hidden)] * 8, "down_proj": [matrix(hidden, 64)] * 4}
    own = layer()
    done = Converter(CPU, named).prepare(own, stored)
    assert done is not None and isinstance(own.method, CodedExperts)
    assert (done.format, done.reason) == (own.method.format, f"stored as BF16, rounded to FP8{against}")
    assert ("a scale for each output" in done.format) == (shared == "output")
    assert not any(name in own.shapes for name, _ in own.named_parameters())
    plain = layer()
    assert Converter(CPU, find("stored", "cuda")).prepare(plain, stored) is None
    left = Converter(CPU, find("int4", "cuda")).prepare(plain, stored)
    assert left is not None and left.format == "floats"
    assert left.reason == "stored as BF16, which is kept; no kernel here multiplies experts that are rounded to int4"
    assert plain.down_proj.dtype == torch.bfloat16
