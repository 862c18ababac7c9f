"""``headrace pull``, ``headrace list`` and ``headrace remove`` on a stand-in for the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import hub as fake
from support.models.tiny_llama import write_config
from support.tiny_gguf import write
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.cli.models.summary import as_table, summarise
from headrace.sources.hub_cache import cached_models


def invoke(*words: str, code: int = 0) -> tuple[list[dict[str, Any]], str]:
    """The lines of JSON that a command writes, and its errors."""
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output
    return [json.loads(line) for line in result.stdout.splitlines()], result.stderr


def test_models_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("llama", "odd", "quantised"):
        (tmp_path / name).mkdir()
    weights = (8).to_bytes(8, "little") + b"{}      "
    write_config(tmp_path / "llama")
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "odd", "architectures": ["OddForCausalLM"]}')
    for name in ("llama", "odd"):
        (tmp_path / name / "model.safetensors").write_bytes(weights)
    write(tmp_path / "quantised" / "tiny-Q8_0.gguf")
    write(tmp_path / "quantised" / "tiny-Q4_K_M.gguf", "mamba")
    repos = {f"some/{name}": tmp_path / name for name in ("llama", "odd", "quantised")}
    with fake.stand_in(repos) as endpoint:
        fake.use(monkeypatch, endpoint, tmp_path / "cache")
        assert invoke("list") == ([], "")
        (pulled,), _ = invoke("pull", "some/llama")
        assert (pulled["model"], pulled["runs"], pulled["format"]) == ("some/llama", "native", "safetensors")
        assert (Path(pulled["path"]) / "config.json").exists() and pulled["revision"] == fake.COMMIT
        for model in ("some/odd", "some/quantised:q8_0", "some/quantised:Q4_K_M"):
            invoke("pull", model)
        _, error = invoke("pull", "some/quantised", code=2)
        assert "several GGUF files, name one: some/quantised:Q4_K_M" in error
        _, error = invoke("pull", str(tmp_path / "llama"), code=2)
        assert "is a local path" in error

    found = {record["model"]: record for record in invoke("list")[0]}
    assert {name: record["runs"] for name, record in found.items()} == {
        "some/llama": "native",
        "some/odd": None,
        "some/quantised:Q8_0": "native",
        "some/quantised:Q4_K_M": None,
    }
    assert "OddForCausalLM is not supported" in found["some/odd"]["reason"]
    assert "mamba" in found["some/quantised:Q4_K_M"]["reason"]
    assert found["some/quantised:Q8_0"]["architecture"] == "LlamaForCausalLM"
    assert found["some/quantised:Q8_0"]["size"] == (tmp_path / "quantised" / "tiny-Q8_0.gguf").stat().st_size
    table = as_table([summarise(model) for model in cached_models()])
    assert not isinstance(table, str) and table.row_count == len(found)

    removed, _ = invoke("remove", "some/quantised:Q8_0", "some/odd")
    assert [record["model"] for record in removed] == ["some/quantised:Q8_0", "some/odd"]
    assert removed[0]["freed"] == found["some/quantised:Q8_0"]["size"]
    assert {record["model"] for record in invoke("list")[0]} == {"some/llama", "some/quantised:Q4_K_M"}
    _, error = invoke("remove", "some/odd", code=2)
    assert "the hub's cache has no model some/odd" in error
    _, error = invoke("remove", code=2)
    assert "name the models to remove" in error
