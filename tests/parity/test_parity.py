"""The parity report: it passes what agrees, fails what does not, and says from which layer on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.models import hybrids, tiny_models
from support.models.architectures import quiet
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.config import EngineArgs
from headrace.errors import ConfigError
from headrace.models import implementation
from headrace.models.fallback.transformers import load
from headrace.parity import Line, Parity, measure
from headrace.parity.layers import RecordedLayers


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-h", "granite-dense", "falcon-h1", "kimi-linear", "lfm2"])
def test_hybrids_round_no_more_than_transformers(name: str, tmp_path: Path) -> None:
    """Though a state in bfloat16 is rounded in other places: a step's or a prompt's."""
    theirs, _ = hybrids.pair(name)
    theirs.save_pretrained(tmp_path)
    parity, lines = run(args(tmp_path, dtype="bfloat16", num_kv_blocks=None, kv_cache_memory=8 << 20))
    assert parity.passed and {line.name for line in parity.lines} >= {"native", "transformers"}
    assert lines["native", "bfloat16"].mean_error > 0


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
    from headrace import parity as module

    made = Parity("LlamaForCausalLM", 9, (Line("native", "float32", 1e-6, 1e-7, 1.0, "", passed, "" if passed else "off"),))
    monkeypatch.setattr(module, "measure", lambda arguments, tell: made)
    found = CliRunner().invoke(app, ["doctor", str(llama), "--parity"])
    assert found.exit_code == (0 if passed else 1)
    assert "LlamaForCausalLM" in found.stdout
    assert ("fail: off" in found.stdout) is not passed
    as_json = CliRunner().invoke(app, ["doctor", str(llama), "--parity", "--json"])
    assert json.loads(as_json.stdout)["passed"] is passed


def not_finite(monkeypatch: pytest.MonkeyPatch, *, rows: int) -> None:
    """The native model's logits are NaN in a row of steps that ask for so many rows or more."""
    plain = implementation.load_weights

    def spoilt(model: Any, *rest: Any, **options: Any) -> Any:
        report = plain(model, *rest, **options)
        logits = model.logits

        def bad(hidden: torch.Tensor) -> torch.Tensor:
            out = logits(hidden).clone()
            if len(out) >= rows:
                out[0] = torch.nan
            return out

        model.logits = bad
        return report

    monkeypatch.setattr(implementation, "load_weights", spoilt)


def test_logits_that_are_not_finite_fail(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    not_finite(monkeypatch, rows=9)
    parity, lines = run(args(llama, dtype="bfloat16"))
    assert not parity.passed
    for dtype in ("float32", "bfloat16"):
        native = lines["native", dtype]
        assert native.passed is False and native.broken > 0
        assert f"{native.broken} positions with logprobs that are not finite" in native.note
        assert lines["transformers", dtype].passed and lines["transformers", dtype].broken == 0


def test_a_sequence_that_ends_early_is_a_failed_line(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    not_finite(monkeypatch, rows=1)
    parity, lines = run(args(llama, dtype="float32"))
    assert not parity.passed
    assert lines["native", "float32"].passed is False
    assert "ended after 0 tokens: the model computed logits that are not finite" in lines["native", "float32"].note
    assert lines["transformers", "float32"].passed


@pytest.mark.parametrize("context", [20, pytest.param(40, marks=pytest.mark.slow)])
def test_prompts_are_cut_to_the_context(llama: Path, context: int) -> None:
    parity, lines = run(args(llama, dtype="float32", max_model_len=context))
    assert parity.passed
    assert lines["native", "float32"].agreement == 1
    (note,) = parity.notes
    assert f"cut to {context - 12}: the context has {context}" in note
    assert ("longer than a step" in note) is (context == 20)
    # A sequence's last token is drawn and not looked at: the first prompt has three.
    assert parity.tokens == 15 + context + min(30 + 12, context)


def test_nothing_is_cut_without_a_word(llama: Path) -> None:
    assert run(args(llama, dtype="float32"))[0].notes == ()


def test_a_model_of_a_short_context(tmp_path: Path) -> None:
    config = tiny_models.config("llama")
    config.max_position_embeddings = 32
    with quiet():
        tiny_models.save(transformers.LlamaForCausalLM._from_config(config, dtype=torch.float32), tmp_path)
    parity, _ = run(args(tmp_path, dtype="float32", max_model_len=None))
    assert parity.passed
    assert "cut to 20: the context has 32" in parity.notes[0]


def test_a_context_without_room_for_a_prompt_is_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match="continues a prompt by 12 tokens, and the context has 12"):
        measure(args(llama, max_model_len=12))


SLOW_KINDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("hrm_text", "gemma3n_text", "gemma4_text")]


@pytest.mark.parametrize("kind", ["roberta", *SLOW_KINDS])
def test_a_line_that_passes_diverges_nowhere(kind: str, tmp_path: Path) -> None:
    """Positions counted without padding; many streams, repeated calls, layers that are more than their forward."""
    parity, _ = run(args(saved(kind, tmp_path), dtype="float32"))
    assert parity.passed
    judged = [line for line in parity.lines if line.passed is not None]
    assert [line.diverging for line in judged] == [""] * len(judged)
    assert max(line.max_error for line in judged) < 1e-4


@pytest.mark.parametrize(
    ("kind", "weight"),
    [
        ("gemma3n_text", "post_attention_layernorm.weight"),
        pytest.param("hrm_text", "self_attn.o_proj.weight", marks=pytest.mark.slow),
    ],
)
def test_a_layer_of_many_streams_or_calls_is_named(
    kind: str, weight: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load.fuse_linears

    def spoilt(model: Any, groups: Any) -> int:
        count = plain(model, groups)
        stack = max((module for module in model.modules() if isinstance(module, torch.nn.ModuleList)), key=len)
        spoil(stack[1], weight)
        return count

    monkeypatch.setattr(load, "fuse_linears", spoilt)
    parity, lines = run(args(saved(kind, tmp_path), dtype="float32"))
    assert not parity.passed
    assert lines["transformers", "float32"].diverging.startswith("layer 1")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("kv_cache_dtype", "fp8_e4m3"),
        ("quantization", "int8"),
        ("max_num_seqs", 9),
        ("deterministic", True),
        ("model_impl", "megatron"),
    ],
)
def test_options_that_it_does_not_measure_are_refused(llama: Path, option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"does not measure|model_impl megatron is for distributed checkpoints") as caught:
        measure(args(llama, **{option: value}))
    assert caught.value.param == option


def test_every_such_option_is_named(llama: Path) -> None:
    with pytest.raises(ConfigError, match="measure --kv-cache-dtype, --max-num-seqs; it honours"):
        measure(args(llama, kv_cache_dtype="fp8_e4m3", max_num_seqs=3))


def test_what_it_computes_with_may_be_said(llama: Path) -> None:
    said = args(llama, dtype="float32", quantization="none", enforce_eager=True, enable_prefix_caching=False)
    assert run(said)[0].passed


def test_experts_are_no_layers() -> None:
    layers = [torch.nn.ModuleDict({"experts": torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(9))}) for _ in "ab"]
    model = torch.nn.ModuleDict({"few": torch.nn.ModuleList([torch.nn.Linear(1, 1)]), "layers": torch.nn.ModuleList(layers)})
    assert RecordedLayers.of(model)._layers == layers


def test_one_implementation_alone(llama: Path) -> None:
    _, lines = run(args(llama, dtype="float32", model_impl="native"))
    assert list(lines) == [("native", "float32")]


def test_a_model_without_a_tokenizer(llama: Path) -> None:
    """transformers makes an empty one for some models."""
    found = measure(args(llama, skip_tokenizer_init=False))
    assert found.passed
    assert re.fullmatch(r"prompts are random tokens: .* has no tokenizer: name another .*", found.notes[0])
    with pytest.raises(ConfigError, match="has no tokenizer"):
        measure(args(llama, skip_tokenizer_init=False, tokenizer=str(llama)))


def test_it_is_not_combined_with_load(llama: Path) -> None:
    found = CliRunner().invoke(app, ["doctor", str(llama), "--parity", "--load"])
    assert found.exit_code == 2
    assert "leave --load out, or --parity" in found.output
