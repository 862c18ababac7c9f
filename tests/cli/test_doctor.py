"""``headrace doctor`` on a model of its own: decisions without weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.models.tiny_llama import write_config
from typer.testing import CliRunner

from headrace.cli.doctor import planned
from headrace.cli.main import app
from headrace.config import EngineArgs
from headrace.errors import ConfigError, MissingPackageError, human_size
from headrace.quant.registry import QUANTIZATIONS, STORED, STORED_INT4

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "use_sliding_window": True,
    "sliding_window": 64,
    "max_window_layers": 0,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "tie_word_embeddings": True,
}


DUMMY = ["--load-format", "dummy", "--dtype", "float32", "--num-kv-blocks", "40"]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def test_gpus_that_are_not_here(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends, memory and cuts are those of the named GPUs, whatever this machine has."""
    monkeypatch.setenv("HEADRACE_PLANNED_SM", "")  # so that it is gone again after the test
    monkeypatch.delenv("HEADRACE_PLANNED_SM")
    args = ["doctor", folder, "--load-format", "dummy", "--json"]
    result = CliRunner().invoke(app, [*args, "--devices", "h200:2"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    decisions = {line["name"]: line for line in report["decisions"]}
    assert decisions["tensor parallelism"]["value"] == "2 ranks"
    assert "no CUDA device" not in decisions["attention_backend"]["reason"]
    assert "H200 (not this machine)" in report["environment"]["device"]
    assert {line["name"]: line["nbytes"] for line in report["memory"]}["KV cache"] > 2**36
    result = CliRunner().invoke(app, [*args, "--devices", "h200", "--quantization", "fp8"])
    decisions = {line["name"]: line for line in json.loads(result.stdout)["decisions"]}
    rounded = decisions["format of layers.*.mlp.down_proj (6 layers)"]
    assert rounded["value"] == "FP8, a scale for each output"
    assert rounded["reason"].startswith("stored as BF16, rounded to FP8; by Triton")
    for words, complaint in (
        (["--devices", "h2000"], "did you mean h200?"),
        (["--devices", "h200:0"], "must be a GPU or GPU:COUNT"),
        (["--devices", "h200", "--load"], "leave --load and --parity out"),
        (["--devices", "h200:2", "-tp", "4"], "--devices has 2 GPUs"),
        (["--devices", "h200", "--device", "cpu"], "device is cpu"),
    ):
        refused = CliRunner().invoke(app, [*args, *words])
        assert refused.exit_code and complaint in " ".join(f"{refused.output} {refused.exception}".split()), words


def test_what_would_fit_is_tried(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 50 billion parameters for one H100: in FP8 or on several; and a small one with a context that is too long."""
    monkeypatch.setenv("HEADRACE_PLANNED_SM", "")  # so that it is gone again after the test
    monkeypatch.delenv("HEADRACE_PLANNED_SM")
    large = {"hidden_size": 16_384, "intermediate_size": 131_072, "num_hidden_layers": 7, "num_attention_heads": 128}
    large |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_000, "layer_types": ["full_attention"] * 7}
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(CONFIG | large | {"use_sliding_window": False}))
    args = ["doctor", folder, "--load-format", "dummy", "--json", "--devices", "h100"]
    result = CliRunner().invoke(app, [*args, "--max-model-len", "256"])
    (found,) = [line["value"] for line in json.loads(result.stdout)["decisions"] if line["name"] == "would fit"]
    assert result.exit_code == 2 and found in " ".join(result.stderr.split())
    assert "--quantization fp8 " in found and "--tensor-parallel-size 2" in found and " none" not in found

    small = {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32, "max_position_embeddings": 2**21}
    path.write_text(json.dumps(CONFIG | large | small | {"use_sliding_window": False}))
    args = [*args[:-1], "l40s", "--quantization", "none", "--max-model-len"]
    result = CliRunner().invoke(app, [*args, str(2**21)])
    (found,) = [line["value"] for line in json.loads(result.stdout)["decisions"] if line["name"] == "would fit"]
    assert "--kv-cache-dtype fp8_e4m3" in found
    result = CliRunner().invoke(app, [*args, found.rpartition("--max-model-len ")[2]])
    assert result.exit_code == 0, result.stderr


def test_the_report(folder: str) -> None:
    result = CliRunner().invoke(
        app, ["doctor", folder, "--load-format", "dummy", "--dtype", "float32", "--num-kv-blocks", "40"]
    )
    assert result.exit_code == 0, result.output
    for words in (
        "Environment",
        "Memory",
        "Attention",
        "Decisions",
        "0\N{EN DASH}4",
        "64 tokens",
        "4 / 2 KV",
        "the weights were not loaded",
    ):
        assert words in result.stdout
    # K and V, two heads of 32, four bytes: and the whole model's below.
    assert "512 B" in result.stdout and "3,072 B" in result.stdout


def test_as_json(folder: str) -> None:
    words = [
        "doctor",
        folder,
        "--load-format",
        "dummy",
        "--dtype",
        "float32",
        "--num-kv-blocks",
        "40",
        "--block-size",
        "8",
        "--json",
    ]
    report = json.loads(CliRunner().invoke(app, words).stdout)
    assert [layer["window"] for layer in report["layers"]] == [64] * 5 + [None]
    assert report["block_size"] == 8 and report["num_blocks"] == [45 + 40 * 5, 9 + 40]
    caches = [line["nbytes"] for line in report["memory"] if line["name"].startswith("KV cache")]
    assert caches == [40 * 8 * 512 * 6, 8 * 512 * 5]
    assert report["architecture"] == "Qwen3ForCausalLM" and "torch" in report["environment"]
    assert all(decision["reason"] for decision in report["decisions"])


@pytest.mark.parametrize("given", [["--kv-cache-memory", "900TiB"], ["--num-kv-blocks", "1000000000000"]], ids=str)
def test_a_model_that_does_not_fit_is_reported_and_refused(folder: str, given: list[str]) -> None:
    result = CliRunner().invoke(app, ["doctor", folder, "--load-format", "dummy", "--json", *given])
    assert result.exit_code == 2 and "are there beside the weights" in result.stderr
    report = json.loads(result.stdout)
    assert len(report["layers"]) == 6 and report["num_blocks"]
    (decision,) = [one for one in report["decisions"] if one["name"] == "memory"]
    assert decision["value"] == "does not fit" and decision["reason"] in result.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("scheme", "value"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "gptq: int4, groups of 32"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            "fp8: e4m3, tiles of 128 x 128, for e4m3 activations (group128)",
        ),
        (None, None),
    ],
)
def test_the_number_format_of_the_checkpoint(tmp_path: Path, scheme: dict[str, Any] | None, value: str | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": scheme}))
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    args = EngineArgs(model=str(tmp_path), dtype="float32", skip_tokenizer_init=True)
    found = {decision.name: decision for decision in planned(args)[0].decisions}
    if value is None:
        assert "checkpoint format" not in found
        return
    assert found["checkpoint format"].value == value
    assert found["checkpoint format"].reason == "its matrices are dequantised to float32"


def test_a_number_format_that_is_not_read_is_the_whole_reason(tmp_path: Path) -> None:
    """And not that a native model, or one of transformers, does not do all."""
    write_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 3, "group_size": 32})
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        planned(EngineArgs(model=str(tmp_path), skip_tokenizer_init=True))
    reason = "quantization_config (gptq): bits 3 is not supported; supported are: 4, 8"
    assert caught.value.message == f"{tmp_path}/config.json: {reason}"


def test_bytes_of_the_weights_in_other_formats(folder: str) -> None:
    info, _ = planned(EngineArgs(model=folder, load_format="dummy", dtype="float32", device="cpu"))
    lines = {line.name.removeprefix("weights in "): line for line in info.decisions if line.name.startswith("weights in ")}
    assert set(lines) == {"float32", *QUANTIZATIONS["cpu"]} - {STORED, STORED_INT4}
    (weights,) = [line.nbytes for line in info.memory if line.name == "weights"]
    assert (lines["float32"].value, lines["float32"].reason) == (human_size(weights), "--quantization none")
    assert lines["int8"].value.startswith("at most ")
    assert "it is for GPUs" in lines["fp8"].reason


def test_formats_of_answers(tmp_path: Path) -> None:
    model = write_config(tmp_path)
    args = EngineArgs(model=str(model), load_format="dummy", tool_call_parser="hermes")
    found = {decision.name: decision for decision in planned(args)[0].decisions}
    assert (found["tool calls"].value, found["tool calls"].reason) == ("hermes", "--tool-call-parser hermes")
    assert found["reasoning"].value == "none"
    with pytest.raises(ConfigError, match="hermez") as caught:
        planned(dataclasses.replace(args, tool_call_parser="hermez"))
    assert caught.value.param == "tool_call_parser"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere/at/all"], "nowhere/at/all"),
        (["a" * 5000], "File name too long"),
        (["a/" * 5000], "there is no"),
        (["~nobody-of-this-name/model"], "~nobody-of-this-name/model"),
        ([".", "--load-format", "dummy", "--max-num-seqs", "1000000000"], "max_num_seqs must be an integer in [1, 65536]"),
        ([".", "--load-format", "dummy", "--num-kv-blocks", "5", "--max-model-len", "256"], "num_kv_blocks"),
        ([".", "--load-format", "dummy", "--max-model-len", "512"], "max_model_len"),
        ([".", "--load-format", "dummy", "--attention-backend", "nonesuch"], "nonesuch"),
        pytest.param(
            [".", "--load-format", "dummy", "--device", "cuda"],
            "no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)
def test_what_cannot_be_served(folder: str, words: list[str], said: str) -> None:
    words = [folder if word == "." else word for word in words]
    result = CliRunner().invoke(app, ["doctor", *words])
    assert result.exit_code == 2
    assert said in result.stderr and len(result.stderr.strip().splitlines()) == 1


def test_a_package_that_is_missing_is_told_of_in_a_line(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise MissingPackageError("this takes another package: pip install another")

    monkeypatch.setattr("headrace.cli.doctor.planned", missing)
    result = CliRunner().invoke(app, ["doctor", folder, "--load-format", "dummy"])
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    assert result.stderr.strip().splitlines() == ["error: this takes another package: pip install another"]
