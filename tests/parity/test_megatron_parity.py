"""The parity report of Megatron-core models, from checkpoints and live: what it compares with, what passes and what fails."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.models import megatron
from support.models.megatron_checkpoint import arguments, save
from support.models.megatron_engine import OWN, SHARED, engine, state_of, tokens_of, train_step
from typer.testing import CliRunner

from headrace import LLM
from headrace.cli.main import app
from headrace.config import EngineArgs
from headrace.errors import ConfigError
from headrace.models.fallback.megatron import checkpoint as megatron_checkpoint
from headrace.models.fallback.megatron.model import CoreAttention
from headrace.models.fallback.megatron.own import EagerAttention
from headrace.parity import Line, Parity, measure

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'headrace[megatron]'")
pytestmark = pytest.mark.filterwarnings("ignore")

OWN_NAME, EAGER_NAME = "Megatron's own forward", "Megatron's modules, eager attention"


def lines_of(parity: Parity) -> dict[tuple[str, str], Line]:
    return {(line.name, line.dtype): line for line in parity.lines}


def assert_exact(parity: Parity, reference: str) -> None:
    assert parity.passed
    line = lines_of(parity)["megatron", "float32"]
    assert line.max_error < 1e-4 and line.agreement == 1 and not line.diverging
    assert parity.tokens > 80
    assert parity.reference == f"{reference}, float32"


# Checkpoints


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save(megatron.gpt(), folder, args=arguments())
    return folder


def args(folder: Path, **changes: Any) -> EngineArgs:
    fields: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu", "num_kv_blocks": 60, "max_model_len": 100}
    return EngineArgs(model=str(folder), **fields | {"num_threads": 1} | changes)


@pytest.mark.slow
def test_a_checkpoint_agrees_with_megatrons_modules(saved: Path) -> None:
    """Its core attention and rotary embedding cannot run on a CPU: the report says what ran instead."""
    parity = measure(args(saved, dtype="bfloat16"))
    assert_exact(parity, EAGER_NAME)
    assert any("core attention and rotary embedding ask for a CUDA device" in note for note in parity.notes)
    lines = lines_of(parity)
    assert lines[EAGER_NAME, "bfloat16"].passed is None and lines[EAGER_NAME, "bfloat16"].mean_error > 0
    assert lines["megatron", "bfloat16"].passed
    assert list(lines) == [("megatron", "float32"), (EAGER_NAME, "bfloat16"), ("megatron", "bfloat16")]


def test_a_checkpoint_agrees_with_megatrons_own_forward(saved: Path) -> None:
    with megatron.no_device_asked_for():
        parity = measure(args(saved, dtype="float32"))
    assert_exact(parity, OWN_NAME)
    assert parity.notes == ()


def spoil_second_load(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    """The reference is loaded first, then the model that the engine runs."""
    plain, loads = megatron_checkpoint._fill, [0]

    def spoilt(model: Any, checkpoint: Any) -> None:
        plain(model, checkpoint)
        loads[0] += 1
        if loads[0] == 2:
            model.decoder.layers[1].mlp.linear_fc2.weight.data.mul_(value)

    monkeypatch.setattr(megatron_checkpoint, "_fill", spoilt)


@pytest.mark.slow
def test_a_layer_of_a_checkpoint_that_is_off_is_named(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_second_load(monkeypatch, 1.5)
    parity = measure(args(saved, dtype="float32"))
    assert not parity.passed
    line = lines_of(parity)["megatron", "float32"]
    assert line.diverging.startswith("layer 1,")
    assert "largest difference" in line.note


@pytest.mark.slow
@pytest.mark.parametrize("value", [pytest.param(1.0, marks=pytest.mark.slow), 1.5])
def test_the_exit_code_says_it(saved: Path, monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    spoil_second_load(monkeypatch, value)
    options = ["--parity", "--dtype", "float32", "--device", "cpu", "--max-model-len", "64", "--skip-tokenizer-init"]
    found = CliRunner().invoke(app, ["doctor", str(saved), *options, "--num-kv-blocks", "20", "--json"])
    assert found.exit_code == (0 if value == 1.0 else 1)
    report = json.loads(found.stdout)
    assert report["passed"] is (value == 1.0)
    assert report["reference"] == f"{EAGER_NAME}, float32"


def test_options_that_are_not_measured_are_refused(saved: Path) -> None:
    with pytest.raises(ConfigError, match="--parity does not measure --kv-cache-dtype"):
        measure(args(saved, kv_cache_dtype="fp8_e4m3"))
    with pytest.raises(ConfigError, match="model_impl native does not read Megatron's"):
        measure(args(saved, model_impl="native"))


# Live models

EAGER: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "QK-norm, biases, tied": {
        "qk_layernorm": True,
        "spec": {"qk_layernorm": True},
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "model": {"share_embeddings_and_output_weights": True},
    },
    "windows in some layers": {"window_size": (5, 0), "window_attn_skip_freq": 2},
    "learned sinks": {"softmax_type": "learnable"},
    "sinks of zero": {"softmax_type": "off-by-one"},
    "interleaved, half of the channels": {"rotary_interleaved": True, "model": {"rotary_percent": 0.5}},
    "learned positions": {"model": {"position_embedding_type": "learned_absolute"}},
}


QUICK = ("windows in some layers", "learned sinks", "interleaved, half of the channels")


@pytest.mark.parametrize("kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in EAGER])
def test_a_live_model_agrees_with_its_modules(kind: str) -> None:
    with megatron.no_device_asked_for():
        model = megatron.gpt(**EAGER[kind])
    parity = engine(model).parity()
    assert_exact(parity, EAGER_NAME)
    assert any("ask for a CUDA device" in note for note in parity.notes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["experts with a bias", "latent, YaRN"])
def test_a_live_model_agrees_with_its_own_forward(kind: str) -> None:
    with megatron.no_device_asked_for():
        assert_exact(engine(megatron.gpt(**OWN[kind])).parity(), OWN_NAME)


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, False])
def test_a_live_model_of_few_bits_is_measured_in_its_dtype(own: bool) -> None:
    """Nothing is converted for good: in float32 its modules compute one by one, and are found as they were."""
    model = megatron.gpt(dtype=torch.bfloat16, bf16=True, std=0.1)
    before = state_of(model)
    llm = engine(model)
    if own:
        with megatron.no_device_asked_for():
            parity = llm.parity()
    else:
        parity = llm.parity()
    assert state_of(model) == before
    assert parity.passed
    assert parity.reference == f"{EAGER_NAME}, float32"
    assert any("the model stays bfloat16" in note for note in parity.notes)
    name = OWN_NAME if own else EAGER_NAME
    assert [(line.name, line.dtype) for line in parity.lines] == [(name, "bfloat16"), ("megatron", "bfloat16")]
    assert all(line.mean_error > 0 for line in parity.lines)


def test_the_float32_of_a_model_of_few_bits_is_that_of_its_weights() -> None:
    """The reference of a bfloat16 model is what a float32 model of the same numbers gives."""
    from headrace.models.fallback.megatron.describe import describe_megatron
    from headrace.models.fallback.megatron.own import OwnForward

    few, wide = megatron.gpt(dtype=torch.bfloat16, bf16=True), megatron.gpt()
    for theirs, own in zip(few.parameters(), wide.parameters(), strict=True):
        own.data.copy_(theirs.data)
    tokens = [5, 9, 33, 2, 71, 8]
    found = OwnForward(describe_megatron(few), in_float32=True).logits(tokens)
    torch.testing.assert_close(found, OwnForward(describe_megatron(wide)).logits(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("factor", "said"), [(1.5, "largest difference"), (float("nan"), "not finite")])
def test_a_layer_of_a_live_model_that_is_off_fails_and_is_named(
    factor: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(megatron.gpt())
    plain = CoreAttention.forward

    def off(self: CoreAttention, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = plain(self, *args, **kwargs)
        return out * factor if self._layer.spec.layer == 1 else out

    monkeypatch.setattr(CoreAttention, "forward", off)
    parity = llm.parity()
    assert not parity.passed
    (line,) = parity.lines
    assert line.passed is False and said in line.note
    assert line.diverging.startswith("layer 1,")


def test_a_reference_that_is_not_finite_is_no_reference() -> None:
    model = megatron.gpt()
    llm = engine(model)
    model.decoder.layers[0].mlp.linear_fc1.weight.data.fill_(float("nan"))
    with pytest.raises(ConfigError, match=f"{EAGER_NAME}, float32, gives logits that are not finite"):
        llm.parity()


@pytest.mark.slow
def test_it_leaves_model_and_engine_as_they_were() -> None:
    """Modes, gradients, cached prefixes; and a trainer's steps go on."""
    model = megatron.gpt(hidden_dropout=0.0, attention_dropout=0.0).train()
    llm = engine(model)
    prompt = [*SHARED, 1, 2, 3, 4]
    expected = tokens_of(llm, prompt)
    before, hits = state_of(model), llm.stats.prefix_hit_tokens
    with megatron.no_device_asked_for():
        assert llm.parity().passed
    assert state_of(model) == before
    assert tokens_of(llm, prompt) == expected
    assert llm.stats.prefix_hit_tokens > hits
    train_step(model)
    assert llm.parity().passed


@pytest.mark.slow
def test_what_a_running_engine_has_and_parity_does_not_measure_is_said() -> None:
    llm = engine(megatron.gpt())
    (note,) = [note for note in llm.parity().notes if note.startswith("not measured")]
    assert note == "not measured: max_num_seqs, max_num_batched_tokens"
    assert llm._external is not None
    llm._external = dataclasses.replace(llm._external, args=dataclasses.replace(llm._external.args, kv_cache_dtype="fp8_e4m3"))
    with pytest.raises(ConfigError, match="parity does not measure kv_cache_dtype") as caught:
        llm.parity()
    assert caught.value.param == "kv_cache_dtype"


def test_what_cannot_run_on_the_device_is_refused_with_the_layer() -> None:
    with megatron.no_device_asked_for():
        model = megatron.gpt(**OWN["latent, YaRN"])
    with pytest.raises(ConfigError, match="layer 0 has multi-head latent attention, whose rotary embedding asks for a CUDA"):
        engine(model).parity()
    model = megatron.gpt()
    llm = engine(model)
    failing = mock.patch.object(EagerAttention, "forward", side_effect=RuntimeError("no such kernel"))
    with failing, pytest.raises(ConfigError, match=r"decoder\.layers\.0\.self_attention\.core_attention: .*no such kernel"):
        llm.parity()
    assert llm.parity().passed


def test_models_from_files_are_not_handed_over(saved: Path) -> None:
    llm = LLM(model=str(saved), num_kv_blocks=20, max_model_len=64, skip_tokenizer_init=True, num_threads=1, device="cpu")
    with pytest.raises(ConfigError, match="one from files is compared by `headrace doctor MODEL --parity`"):
        llm.parity()
