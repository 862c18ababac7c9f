"""``--models-config``: a file of several models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.cli.models.hosted import read_models
from headrace.config import EngineArgs
from headrace.errors import ConfigError
from headrace.server.models.options import ModelsOptions
from headrace.server.settings import ServerSettings

Write = Callable[[str], Path]
SETTINGS = ServerSettings(api_keys=("k",), max_n=7)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "models.yaml"
        path.write_text(text)
        return path

    return write


def test_each_model_has_its_own_options_and_else_those_of_the_command_line(write: Write) -> None:
    path = write(
        """
        small:
          kv-cache-memory: 64MiB
          served-model-name: [tiny, mini]
          model-alias: gpt-*=small
          chat-template: "{{ messages }}"
        large:
          model: some/model
          max_num_seqs: 3
          max-n: 2
        """
    )
    small, large = read_models(path, EngineArgs(max_num_seqs=5, block_size=32), SETTINGS)
    assert (small.args.kv_cache_memory, small.args.max_num_seqs, small.args.model) == (2**26, 5, None)
    assert (large.args.model, large.args.max_num_seqs, large.args.block_size) == ("some/model", 3, 32)
    assert small.settings.served_model_names == ("small", "tiny", "mini") and small.settings.model_alias == ("gpt-*=small",)
    assert (small.settings.chat_template, small.settings.max_n) == ("{{ messages }}", 7)
    assert large.settings == dataclasses.replace(SETTINGS, served_model_names=("large",), max_n=2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no models"),
        ("a: 5\n", ":1: a configuration file is a mapping"),
        ("[a]\n", ":1: a configuration file is a mapping"),
        ("a: {max-num-seqs: 0}\n", ":1: max_num_seqs must be"),
        ("a:\n  port: 80\n", ":2: port is not an option of a model of --models-config"),
        ("a:\n  model: /no/such\n", ":1: a: there is no file or directory /no/such"),
        ("a: {block-size: 16}\na: {block-size: 16}\n", ":2: a stands on line 1 already"),
        ("a:\n  model-alias: x=b\n", ":1: a: model_alias must be PATTERN=NAME"),
    ],
)
def test_mistakes_are_told_with_their_line(text: str, said: str, write: Write) -> None:
    with pytest.raises(ConfigError) as error:
        read_models(write(text), EngineArgs(), ServerSettings())
    assert said in str(error.value)


def test_what_several_models_cannot_have(write: Write) -> None:
    path = write("a: {block-size: 16}\n")
    for settings, said in (
        (ServerSettings(served_model_names=("x",)), "has its own served_model_names"),
        (ServerSettings(enable_rl_api=True), "weights that a trainer has changed would be lost"),
        (ServerSettings(alias_all_models=True), "a request names one of the models"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_models(path, EngineArgs(), settings)
    with pytest.raises(ConfigError, match="leave MODEL out"):
        read_models(path, EngineArgs(model="x"), ServerSettings())
    with pytest.raises(ConfigError, match="models_memory is about the models of --models-config"):
        ModelsOptions(models_memory=5)
    result = CliRunner().invoke(app, ["serve", "--models-config", "/no/such.yaml"])
    assert result.exit_code == 2 and "/no/such.yaml" in result.output


def test_the_default_model_need_not_be_there(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise ConfigError("the default model is not installed")

    monkeypatch.setattr("headrace.sources.embedded.find", missing)
    monkeypatch.setattr("headrace.cli.serve.set_up_logs", lambda level: None)
    (small,) = read_models(write("a: {model: some/model}\n"), EngineArgs(), ServerSettings())
    assert small.args.model == "some/model"
    result = CliRunner().invoke(app, ["serve", "--models-config", str(write("a: {model: /no/such}\n"))])
    assert result.exit_code == 2 and "/no/such" in result.output and "not installed" not in result.output
    assert "the default model is not installed" in CliRunner().invoke(app, ["serve"]).output
