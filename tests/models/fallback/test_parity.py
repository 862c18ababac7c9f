"""The parity report: it passes what agrees, fails what does not, and says from which layer on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from headrace.bench import tiny_models
from headrace.bench.architectures import quiet
from headrace.cli.main import app
from headrace.config import EngineArgs
from headrace.engine.parity import Line, Parity, measure
from headrace.errors import ConfigError
from headrace.models import implementation
from headrace.models.fallback import load


def args(folder: Path, **changes: Any) -> EngineArgs:
    fields: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu", "num_kv_blocks": 60, "max_model_len": 100}
    return EngineArgs(model=str(folder), **fields | {"num_threads": 1} | changes)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("llama"))


def saved(kind: str, folder: Path) -> Path:
    with quiet():
        tiny_models.save(tiny_models.model(kind), folder)
    return folder


def run(arguments: EngineArgs) -> tuple[Parity, dict[tuple[str, str], Line]]:
    with quiet():
        parity = measure(arguments)
    return parity, {(line.name, line.dtype): line for line in parity.lines}


def test_both_implementations_agree_with_transformers(llama: Path) -> None:
    parity, lines = run(args(llama, dtype="bfloat16"))
    assert parity.passed
    for name in ("native", "transformers"):
        exact, rounded = lines[name, "float32"], lines[name, "bfloat16"]
        assert exact.passed and exact.max_error < 1e-4 and exact.agreement == 1 and not exact.diverging
        assert rounded.passed and rounded.mean_error > exact.mean_error
    own = lines["transformers' own forward", "bfloat16"]
    assert own.passed is None and own.mean_error > 0
    assert parity.tokens > 80


def spoil(model: torch.nn.Module, name: str) -> None:
    with torch.no_grad():
        dict(model.named_parameters())[name].mul_(1.5)


def test_a_layer_that_is_off_is_named(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = implementation.load_weights

    def spoilt(model: Any, *rest: Any, **options: Any) -> Any:
        report = plain(model, *rest, **options)
        spoil(model, "layers.1.mlp.down_proj.weight")
        return report

    monkeypatch.setattr(implementation, "load_weights", spoilt)
    parity, lines = run(args(llama, dtype="float32"))
    assert not parity.passed
    native = lines["native", "float32"]
    assert native.passed is False
    assert native.diverging.startswith("layer 1,")
    assert "largest difference" in native.note
    assert lines["transformers", "float32"].passed


def test_the_foreign_model_is_judged_too(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = load.fuse_linears

    def spoilt(model: Any, groups: Any) -> int:
        count = plain(model, groups)
        spoil(model, "model.layers.2.self_attn.o_proj.weight")
        return count

    monkeypatch.setattr(load, "fuse_linears", spoilt)
    parity, lines = run(args(llama, dtype="float32"))
    assert not parity.passed
    assert lines["transformers", "float32"].diverging.startswith("layer 2,")
    assert lines["native", "float32"].passed


def test_a_model_without_a_native_implementation(tmp_path: Path) -> None:
    parity, lines = run(args(saved("granite", tmp_path), dtype="float32"))
    assert parity.passed
    assert lines["native", "float32"].note == "there is none"
    assert lines["native", "float32"].passed is None


def test_weights_that_transformers_cannot_read_are_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match="wants safetensors"):
        measure(args(llama, load_format="dummy"))


@pytest.mark.parametrize("passed", [True, False])
def test_the_exit_code_says_it(llama: Path, monkeypatch: pytest.MonkeyPatch, passed: bool) -> None:
    from headrace.engine import parity as module

    made = Parity("LlamaForCausalLM", 9, (Line("native", "float32", 1e-6, 1e-7, 1.0, "", passed, "" if passed else "off"),))
    monkeypatch.setattr(module, "measure", lambda arguments, tell: made)
    found = CliRunner().invoke(app, ["doctor", str(llama), "--parity"])
    assert found.exit_code == (0 if passed else 1)
    assert "LlamaForCausalLM" in found.stdout
    assert ("fail: off" in found.stdout) is not passed
    as_json = CliRunner().invoke(app, ["doctor", str(llama), "--parity", "--json"])
    assert json.loads(as_json.stdout)["passed"] is passed
