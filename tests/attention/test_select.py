"""Choosing a backend: by capability, with reasons, from an open list."""

from __future__ import annotations

import dataclasses

import pytest
from support.attention_cases import layer_spec

from headrace.attention import select
from headrace.attention.backend import VISIBLE_ENDS
from headrace.attention.compose import usual_of
from headrace.attention.native import NativeAttention
from headrace.attention.reference import ReferenceAttention
from headrace.attention.triton import TritonAttention
from headrace.errors import ConfigError
from headrace.model_spec import AttentionSpec


def test_the_fast_one_is_chosen_on_the_cpu() -> None:
    choice = select.choose(layer_spec(), "cpu", "bfloat16")
    assert choice.name == choice.decode == choice.prefill == select.names()[0] and "fastest" in choice.reason


def test_the_oracle_takes_over_with_the_reason() -> None:
    choice = select.choose(layer_spec(), "cuda", "float32", requested="auto")
    assert choice.name == "reference"
    assert "torch (it runs on the CPU, not on cuda)" in choice.reason


def test_what_is_asked_for_is_taken() -> None:
    choice = select.choose(layer_spec(), "cpu", "float32", requested="reference")
    assert (choice.name, choice.reason) == ("reference", "asked for")


def test_a_refusal_names_layer_and_reason() -> None:
    with pytest.raises(ConfigError, match=r"layer 7: attention backend torch .* not in float8_e4m3") as caught:
        select.choose(layer_spec(layer=7), "cpu", "float8_e4m3", requested="torch")
    assert caught.value.param == "attention_backend"


@pytest.mark.parametrize(
    "call", [lambda: select.choose(layer_spec(), "cpu", "float32", requested="flesh"), lambda: select.create("flesh")]
)
def test_an_unknown_name_lists_the_known(call) -> None:
    with pytest.raises(ConfigError, match=r"'flesh'; there are: .*torch, .*reference"):
        call()


def test_other_modes_are_refused() -> None:
    for name, reasons in select.refusals(layer_spec(), "cpu", "float32", modes=frozenset({"sparse"})).items():
        assert "it has no mode sparse" in reasons, name


def test_visible_ends_are_for_those_that_know_them() -> None:
    refused = select.refusals(layer_spec(), "cpu", "float32", modes=frozenset({VISIBLE_ENDS}))
    unknowing = {name for name, reasons in refused.items() if f"it has no mode {VISIBLE_ENDS}" in reasons}
    assert unknowing == {"native", "cudnn+triton", "flashinfer+triton", "flashinfer"}
    usual = select.choose(layer_spec(), "cpu", "float32")
    choice = select.choose(layer_spec(), "cpu", "float32", modes=frozenset({VISIBLE_ENDS}))
    assert choice.name == usual.name
    assert (f"steps with {VISIBLE_ENDS} by torch" in choice.does) == (usual.name == "native")


def test_steps_without_visible_ends_keep_the_usual_backend() -> None:
    specs, modes = [layer_spec()], frozenset({VISIBLE_ENDS})
    (backend,) = select.create_for(specs, ["native"], "cpu", "float32", modes=modes)
    assert (backend.name, type(usual_of(backend))) == ("native", NativeAttention) and VISIBLE_ENDS in backend.modes
    (alone,) = select.create_for(specs, ["torch"], "cpu", "float32", modes=modes)
    assert usual_of(alone) is alone, "it runs all steps itself"


@pytest.mark.parametrize("name", ["flashinfer", "flashinfer+triton"])
def test_pictures_seen_both_ways_leave_flashinfer_the_other_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses the mode with a reason, and the kernel that knows it runs the steps with such pictures."""
    monkeypatch.setattr(TritonAttention, "supports", staticmethod(lambda *_: []))  # which looks for the device
    modes = frozenset({VISIBLE_ENDS})
    assert f"it has no mode {VISIBLE_ENDS}" in select.refusals(layer_spec(), "cuda", "bfloat16", modes=modes)[name]
    assert select.for_modes(layer_spec(), name, "cuda", "bfloat16", modes=modes) == "triton"
    assert select.for_modes(layer_spec(), name, "cuda", "bfloat16") is None, "Qwen's pictures are causal"


def test_a_backend_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    class Faster(ReferenceAttention):
        name = "faster"

        @classmethod
        def supports(cls, spec, device, dtype, kv_dtype=None, modes=frozenset()):
            return [] if spec.head_dim < 99 else ["its heads are narrow"]

    monkeypatch.setattr(select, "_ENTRIES", dict(select._ENTRIES))
    select.register(Faster, before="torch")
    assert select.names().index("faster") == select.names().index("torch") - 1
    with pytest.raises(ValueError, match="already"):
        select.register(Faster)
    with pytest.raises(ValueError):
        select.register(type("Other", (Faster,), {"name": "other"}), before="nothing")
    assert isinstance(select.create("faster"), Faster)
    assert select.refusals(layer_spec(head_dim=100), "cpu", "float32")["faster"] == ["its heads are narrow"]


def test_an_fp8_cache_is_for_those_that_know_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for device, dtype in (("cpu", "float32"), ("cuda", "bfloat16")):
        refused = select.refusals(layer_spec(), device, dtype, "fp8_e4m3")
        assert {name for name, reasons in refused.items() if any("scales" in why for why in reasons)} == {
            "native",
            "torch",
            "cudnn+triton",
            "flashinfer+triton",
            "flashinfer",
        }
        plain = select.refusals(layer_spec(), device, dtype, dtype)
        assert not any("scales" in why for reasons in plain.values() for why in reasons)
    choice = select.choose(layer_spec(), "cpu", "float32", "fp8_e4m3")
    assert choice.name == "reference" and "torch (it has no per-token-head scales" in choice.reason
    with pytest.raises(ConfigError, match=r"layer 0: attention backend torch .* scales"):
        select.choose(layer_spec(), "cpu", "float32", "fp8_e4m3", requested="torch")


def test_no_backend_supports_the_layer() -> None:
    only = {"torch": select._ENTRIES["torch"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "_ENTRIES", only)
        with pytest.raises(ConfigError, match="layer 0: no attention backend can run it: torch"):
            select.choose(layer_spec(), "cuda", "float32")


def test_a_kind_of_heads_that_a_backend_does_not_know_is_refused() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Invented(AttentionSpec):
        invented: bool = False

    plain = {field.name: getattr(layer_spec(), field.name) for field in dataclasses.fields(AttentionSpec)}
    assert not Invented(**plain).kinds
    refused = select.refusals(Invented(**plain, invented=True), "cpu", "float32")
    assert all("it does not support a layer's invented" in reasons for reasons in refused.values())
