"""``headrace encode`` and what ``headrace doctor`` says of pictures, on a tiny model."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from safetensors import SafetensorError
from safetensors.torch import load_file
from support.media import encoded, noise
from support.served_pictures import served
from typer.testing import CliRunner

from headrace import SamplingParams
from headrace.cli.main import app

SHORT = SamplingParams(max_tokens=4, temperature=0.0, logprobs=0)


def test_features_are_what_the_encoder_makes_of_the_picture(tmp_path: Path) -> None:
    model = served("qwen2_5_vl")
    for name, size in (("a.png", (50, 40)), ("b.png", (30, 90))):
        (tmp_path / name).write_bytes(encoded(noise(*size)))
    words = ["encode", "--model", str(model.folder), "--dtype", "float32", str(tmp_path / "a.png"), str(tmp_path / "b.png")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    data = base64.b64encode((tmp_path / "a.safetensors").read_bytes()).decode()
    tensors = load_file(tmp_path / "a.safetensors")
    assert f"{len(tensors['features'])} tokens of 64 numbers" in result.output
    parts = [{"type": "image_embeds", "image_embeds": {"data": data}}, {"type": "image_pil", "image_pil": noise(50, 40)}]
    outputs = []
    for part in parts:
        model.llm.reset_prefix_cache()
        outputs += model.llm.chat([{"role": "user", "content": [part]}], SHORT)
    assert outputs[0].prompt_token_ids == outputs[1].prompt_token_ids
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    assert outputs[0].outputs[0].logprobs == outputs[1].outputs[0].logprobs, "bit for bit"


def test_mistakes(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(b"no picture")
    misnamed = tmp_path / "b.safetensors"
    misnamed.write_bytes(encoded(noise(50, 40)))
    folder = str(served("qwen2_5_vl").folder)
    for words, expected in (
        ([str(tmp_path / "missing.png")], "there is no file"),
        ([str(picture), "--output", str(picture)], "there is no directory"),
        ([str(picture), str(picture)], "one file"),
        ([str(picture)], "is not a picture"),
        ([str(picture), "--max-media-bytes", "9"], "a.png has more than 9 bytes (--max-media-bytes)"),
        ([str(misnamed)], "features would replace it"),
        ([str(picture), str(misnamed)], "features would replace it"),
    ):
        result = CliRunner().invoke(app, ["encode", "--model", folder, *words])
        assert result.exit_code == 2, result.output
        assert expected in " ".join(result.output.split())


def test_a_disk_that_is_full_is_one_line_and_the_earlier_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    (tmp_path / "a.png").write_bytes(encoded(noise(50, 40)))
    (tmp_path / "a.safetensors").write_bytes(b"earlier")
    result = CliRunner().invoke(app, ["encode", "--model", str(served("qwen2_5_vl").folder), str(tmp_path / "a.png")])
    assert result.exit_code == 1, result.output
    assert "a.safetensors: No space left on device" in "".join(result.output.split("\n"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.safetensors"]
    assert (tmp_path / "a.safetensors").read_bytes() == b"earlier"


def test_doctor_says_how_many_tokens_a_picture_takes() -> None:
    folder = str(served("qwen2_5_vl").folder)
    small = ["--num-kv-blocks", "40", "--json", "--load-format", "dummy"]
    result = CliRunner().invoke(app, ["doctor", folder, *small, "--image-size", "56x56", "--image-size", "112x56"])
    assert result.exit_code == 0, result.output
    said = {decision["name"]: decision["value"] for decision in json.loads(result.stdout)["decisions"]}
    assert (said["picture of 56 x 56"], said["picture of 112 x 56"]) == ("4 tokens", "8 tokens")
    for wrong in ("56", "0x5", "axb"):
        assert CliRunner().invoke(app, ["doctor", folder, "--image-size", wrong]).exit_code == 2
