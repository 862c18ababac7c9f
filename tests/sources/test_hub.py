"""Models of the hub: which files a name means, what is downloaded, and what the cache has then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from support import hub as fake
from support.models.tiny_llama import write_config
from support.tiny_gguf import write

from headrace.config import EngineArgs
from headrace.errors import ConfigError
from headrace.sources.files import find_model
from headrace.sources.hub import choose_gguf, split_name
from headrace.sources.hub_cache import cached_models, remove
from headrace.sources.locate import locate

SIZES = {"a-Q4_K_M.gguf": 3 * 2**30, "a-UD-Q4_K_XL.gguf": 2**30, "a-bf16.gguf": 9 * 2**30, "mmproj-F16.gguf": 1, "b.gguf": 5}


@pytest.mark.parametrize(
    ("label", "file"),
    [("Q4_K_M", "a-Q4_K_M.gguf"), ("ud-q4_k_xl", "a-UD-Q4_K_XL.gguf"), ("BF16", "a-bf16.gguf"), ("b", "b.gguf")],
)
def test_a_label_names_a_file(label: str, file: str) -> None:
    assert choose_gguf("some/repo", label, SIZES) == file


def test_what_a_label_cannot_mean() -> None:
    with pytest.raises(ConfigError, match=r"no GGUF file of Q4_K_S; did you mean Q4_K_M\?.*repo:Q4_K_M \(3.00 GiB\)") as error:
        choose_gguf("some/repo", "Q4_K_S", SIZES)
    assert "mmproj" not in error.value.message
    with pytest.raises(ConfigError, match="several GGUF files, name one: some/repo:Q4_K_M"):
        choose_gguf("some/repo", None, SIZES)
    assert choose_gguf("some/repo", None, {"one-Q8_0.gguf": 1, "mmproj.gguf": 1}) == "one-Q8_0.gguf"
    two = {"a/base-Q8_0.gguf": 1, "b/chat-Q8_0.gguf": 2}
    with pytest.raises(ConfigError, match=r"several GGUF files of Q8_0, name one: r:base-Q8_0 .*, r:chat-Q8_0"):
        choose_gguf("r", "Q8_0", two)
    assert choose_gguf("r", "chat-q8_0", two) == "b/chat-Q8_0.gguf"
    with pytest.raises(ConfigError, match="r:Q8_0 is split into 2 files"):
        choose_gguf("r", "Q8_0", {"a-Q8_0-00001-of-00002.gguf": 1, "a-Q8_0-00002-of-00002.gguf": 1})
    with pytest.raises(ConfigError, match="has no GGUF files: leave :Q8_0 out"):
        choose_gguf("r", "Q8_0", {})


def test_names(tmp_path: Path) -> None:
    assert split_name("some/repo:Q4_K_M") == ("some/repo", "Q4_K_M")
    assert split_name("some/repo") == ("some/repo", None)
    assert locate("some/repo:Q4_K_M") is None
    (tmp_path / "odd:name").mkdir()
    assert locate(str(tmp_path / "odd:name")) == tmp_path / "odd:name"
    with pytest.raises(ConfigError, match="there is no file or directory"):
        locate("some/repo:")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two repositories behind the stand-in, and an empty cache. Returns the folder that has both."""
    quantised = tmp_path / "hub" / "quantised"
    quantised.mkdir(parents=True)
    for name in ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf"):
        write(quantised / name)
    plain = tmp_path / "hub" / "plain"
    plain.mkdir()
    write_config(plain)
    (plain / "pytorch_model.bin").write_bytes(b"pickle")
    (plain / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")
    with fake.stand_in({"some/quantised": quantised, "some/plain": plain}) as endpoint:
        fake.use(monkeypatch, endpoint, tmp_path / "cache")
        yield tmp_path / "hub"


def test_downloads_and_the_cache(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cached_models() == []
    files = find_model(EngineArgs(model="some/quantised:q8_0"))
    assert (files.kind, files.name, files.gguf_file and files.gguf_file.name) == (
        "gguf",
        "some/quantised:q8_0",
        "tiny-Q8_0.gguf",
    )
    with pytest.raises(ConfigError, match="several GGUF files, name one: some/quantised:Q4_K_M"):
        find_model(EngineArgs(model="some/quantised"))
    assert find_model(EngineArgs(model="some/plain")).kind == "safetensors"
    assert not list(hub.parent.glob("cache/**/*.bin"))
    with pytest.raises(ConfigError, match="has no GGUF files"):
        find_model(EngineArgs(model="some/plain:Q8_0"))
    with pytest.raises(ConfigError, match="the hub has no model some/other"):
        find_model(EngineArgs(model="some/other:Q8_0"))
    with pytest.raises(ConfigError, match="has no revision 'v2'"):
        find_model(EngineArgs(model="some/plain", revision="v2"))

    models = {model.name: model for model in cached_models()}
    assert {name: model.format for name, model in models.items()} == {
        "some/plain": "safetensors",
        "some/quantised:Q8_0": "gguf",
    }
    assert models["some/quantised:Q8_0"].path == files.gguf_file
    assert models["some/quantised:Q8_0"].size == (hub / "quantised" / "tiny-Q8_0.gguf").stat().st_size

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert find_model(EngineArgs(model="some/quantised:Q8_0")).gguf_file == files.gguf_file
    with pytest.raises(ConfigError, match=r"no GGUF file of Q4_K_M; there is some/quantised:Q8_0"):
        find_model(EngineArgs(model="some/quantised:Q4_K_M"))


def test_removal(hub: Path) -> None:
    for name in ("some/quantised:Q8_0", "some/quantised:Q4_K_M", "some/plain"):
        find_model(EngineArgs(model=name))
    # Both files have the same content, which the other one still needs.
    assert remove("some/quantised:Q8_0") == 0
    assert find_model(EngineArgs(model="some/quantised:Q4_K_M")).kind == "gguf"
    assert {model.name for model in cached_models()} == {"some/plain", "some/quantised:Q4_K_M"}
    assert remove("some/quantised:Q4_K_M") == (hub / "quantised" / "tiny-Q4_K_M.gguf").stat().st_size
    with pytest.raises(ConfigError, match=r"has no model some/plan; did you mean some/plain\?"):
        remove("some/plan")
    remove("some/plain")
    assert cached_models() == []
    assert not list(hub.parent.glob("cache/models--*"))
