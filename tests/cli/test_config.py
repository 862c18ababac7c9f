"""``--config``: options from a YAML file, and ``headrace config show``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
import typer
import yaml
from support.pages import ROOT, blocks
from typer.testing import CliRunner

from cli.test_options import COMPANIONS, FREE, parsed, sample
from headrace.cli.main import app
from headrace.cli.options import ENGINE_OPTIONS, SAMPLING_OPTIONS, Group, command
from headrace.cli.serve import MODELS_OPTIONS, SERVER_OPTIONS
from headrace.config import EngineArgs
from headrace.options import Checked, Option, OptionSpec, options
from headrace.server.settings import ServerSettings

Write = Callable[[str], str]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in (EngineArgs, ServerSettings):
        for option in options(cls).values():
            if option.environment is not None:
                monkeypatch.delenv(option.environment, raising=False)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> str:
        path = tmp_path / "headrace.yaml"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize("spelling", ["dashes", "underscores"])
@pytest.mark.parametrize(("group", "option"), FREE, ids=lambda case: getattr(case, "name", ""))
def test_each_option_may_stand_in_the_file(group: Group[Any], option: Option, spelling: str, write: Write) -> None:
    _, expected = sample(option)
    key = option.key if spelling == "dashes" else option.key.replace("-", "_")
    path = write(yaml.safe_dump({key: msgspec.to_builtins(expected, enc_hook=str)}))
    built = parsed(group, ["--config", path, *COMPANIONS.get(option.name, [])])
    got = built[option.name] if isinstance(built, dict) else getattr(built, option.name)
    assert got == expected and type(got) is type(expected)


def test_sizes_and_single_values(write: Write) -> None:
    path = write("kv-cache-memory: 2GiB\nmax-model-len: auto\nmodel: x\nrevision: null\n")
    assert parsed(ENGINE_OPTIONS, ["--config", path]) == EngineArgs(kv_cache_memory=2**31, max_model_len="auto", model="x")
    assert parsed(SERVER_OPTIONS, ["--config", write("api-key: one\n")]).api_keys == ("one",)
    assert parsed(SAMPLING_OPTIONS, ["--config", write("logit-bias: {5: -1.5}\nstop: x\n")]) == {
        "logit_bias": {5: -1.5},
        "stop": ["x"],
    }
    assert parsed(ENGINE_OPTIONS, ["--config", write("")]) == EngineArgs()


@pytest.mark.parametrize("option", [o for cls in (EngineArgs, ServerSettings) for o in options(cls).values() if o.environment])
def test_the_command_line_then_the_environment_then_the_file(
    option: Option, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    group: Group[Any] = ENGINE_OPTIONS if option.owner is EngineArgs else SERVER_OPTIONS
    kind = (lambda text: (text,)) if option.name.endswith("_keys") else int
    path = write(f"{option.key}: {'31' if kind is int else 'the-31'}\n")

    def value(*words: str) -> Any:
        return getattr(parsed(group, ["--config", path, *words]), option.name)

    assert value() == (31 if kind is int else ("the-31",))
    assert option.environment is not None
    monkeypatch.setenv(option.environment, "32")
    assert value() == kind("32")
    assert value(f"--{option.key}", "33") == kind("33")
    monkeypatch.setenv(option.environment, " ")
    assert value() == (31 if kind is int else ("the-31",)), "an empty variable counts as unset"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: 1\nmax_modle_len: 5\n", ":2: max_modle_len is not an option of headrace serve; did you mean max-model-len?"),
        (
            "no-enable-prefix-caching: true\n",
            ":1: no-enable-prefix-caching is not an option of headrace serve; did you mean enable-",
        ),
        ("zzz: 1\n", ":1: zzz is not an option of headrace serve"),
        ("config: x\n", "config is not an option"),
        ("port: 1\nmodel: x\nport: 1\n", ":3: port stands on line 1 already"),
        ("max-model-len: 5\n\nmax_model_len: 6\n", ":3: max_model_len stands on line 1 already"),
        ("revision: no\n", ":1: revision must be a string, not False; quote it in YAML"),
        ("\nrevision: 2024-01-01\n", ":2: revision must be a string, not datetime.date(2024, 1, 1); quote it in YAML"),
        ('log-requests: "on"\n', ":1: log_requests must be True or False, not 'on'"),
        ("log-requests: 1\n", ":1: log_requests must be True or False, not 1"),
        ("port: true\n", ":1: port must be an integer in [0, 65535], not True"),
        ('port: "80"\n', ":1: port must be an integer in [0, 65535], not '80'"),
        ("port: 65536\n", ":1: port must be an integer in [0, 65535], not 65536"),
        ("port: [80]\n", ":1: port must be an integer in [0, 65535], not [80]"),
        ("kv-cache-memory: 2 parsecs\n", ":1: "),
        ("api-key: {a: 1}\n", ":1: api_keys must be a tuple"),
        ("log-level: on\n", ":1: log_level must be one of 'debug', 'info', 'warning', 'error', not True"),
        ("- port\n", ":1: a configuration file is a mapping from options to values"),
        ("port: [1\n", ":2: this is not YAML"),
        ("port: 1\n---\nport: 2\n", ":2: this is not YAML: but found another document"),
        ("api-key: !!python/object:os.system {}\n", ":1: this is not YAML: could not determine a constructor"),
        ("port: \x07\n", "cannot read"),
    ],
)
def test_mistakes_are_told_with_their_line(text: str, message: str, write: Write) -> None:
    result = CliRunner().invoke(app, ["serve", "--config", write(text)], prog_name="headrace")
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert result.stderr.count("\n") == 1


def test_a_file_that_is_not_there() -> None:
    result = CliRunner().invoke(app, ["serve", "--config", "/no/such/file.yaml"])
    assert result.exit_code == 2 and "there is no file /no/such/file.yaml" in result.stderr


def test_keys_twice_in_a_nested_mapping(write: Write) -> None:
    typed = typer.Typer()
    typed.command()(command(sampling=SAMPLING_OPTIONS)(lambda sampling: None))
    result = CliRunner().invoke(typed, ["--config", write("logit-bias:\n  5: 1\n  5: 2\n")])
    assert ":3: 5 stands on line 2 already" in result.stderr


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnOptions(Checked):
    count: Annotated[int, OptionSpec(min=1)] = 3
    """Number of them."""
    verbose: bool = False
    """Say more."""
    key: Annotated[str | None, OptionSpec(secret=True)] = dataclasses.field(
        default_factory=lambda: os.environ.get("HEADRACE_TEST_KEY"), metadata={"environment": "HEADRACE_TEST_KEY"}
    )
    """A secret."""


def test_options_of_the_command_itself(write: Write) -> None:
    seen: list[Any] = []

    def run(args: EngineArgs, options: OwnOptions) -> None:
        seen.append((options.count, options.verbose, options.key))

    typed = typer.Typer()
    typed.command()(command(args=ENGINE_OPTIONS, options=Group.of(OwnOptions))(run))
    runner, path = CliRunner(), write("count: 5\nverbose: true\nkey: file\nmodel: x\n")
    for words, variables in [([], {}), (["--count", "3", "--no-verbose"], {}), ([], {"HEADRACE_TEST_KEY": "variable"})]:
        assert runner.invoke(typed, ["--config", path, *words], env=variables).exit_code == 0
    assert seen == [(5, True, "file"), (3, False, "file"), (5, True, "variable")]
    for text in ("count: 0", "count: 2.5", "verbose: yes please", "words: [a]"):
        assert runner.invoke(typed, ["--config", write(text)]).exit_code == 2
    assert len(seen) == 3


def shown(*words: str) -> dict[str, tuple[str, str]]:
    """Key -> (value, source), as ``headrace config show`` prints them."""
    result = CliRunner().invoke(app, ["config", "show", *words])
    assert result.exit_code == 0, result.output
    found = {}
    for line in result.output.splitlines():
        setting, source = line.rsplit("  # ", 1)
        key, value = setting.split(": ", 1)
        found[key] = (value.strip(), source)
    return found


def test_show_says_where_each_value_comes_from(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("max-model-len: 2048\nport: 1\nlog-level: debug\nallowed-host: [a, b]\nmax-stop-seqs-num: 5\n")
    monkeypatch.setenv("HEADRACE_MAX_STOP_SEQS_NUM", "6")
    monkeypatch.setenv("HEADRACE_API_KEY", "secret-one,secret-two")
    found = shown("--config", path, "--port", "2", "m/m")
    assert found["model"] == ("m/m", "command line")
    assert found["port"] == ("2", "command line")
    assert found["max-model-len"] == ("2048", f"{path}:1")
    assert found["log-level"] == ("debug", f"{path}:3")
    assert found["allowed-host"] == ("[a, b]", f"{path}:4")
    assert found["max-stop-seqs-num"] == ("6", "environment HEADRACE_MAX_STOP_SEQS_NUM")
    assert found["dtype"] == ("auto", "default")
    assert found["# api-key"] == ("2 values that are not shown", "environment HEADRACE_API_KEY")
    assert "secret" not in str(found)
    names = {option.key for group in (ENGINE_OPTIONS, SERVER_OPTIONS, MODELS_OPTIONS) for option in group.options}
    assert {key.removeprefix("# ") for key in found} == names | {"log-level", "report"}


def test_what_is_shown_is_a_file(write: Write) -> None:
    words = ["--max-model-len", "auto", "--kv-cache-memory", "1GiB", "--step-timeout", "1e-5", "--revision", "no"]
    words += ["--served-model-name", "a: b # c", "--served-model-name", "ü", "--no-log-requests", "--tokenizer", "1.5"]
    text = CliRunner().invoke(app, ["config", "show", *words]).output
    for group in (ENGINE_OPTIONS, SERVER_OPTIONS):
        mine = [word for word in text.splitlines() if word.split(":")[0] in {option.key for option in group.options}]
        built = parsed(group, ["--config", write("\n".join(mine))])
        if group is ENGINE_OPTIONS:
            changed = EngineArgs(max_model_len="auto", kv_cache_memory=2**30, step_timeout=1e-5, revision="no", tokenizer="1.5")
            assert built == changed
        else:
            assert built == dataclasses.replace(ServerSettings(), served_model_names=("a: b # c", "ü"), log_requests=False)


def test_a_configuration_that_contradicts_itself_is_refused(write: Write) -> None:
    result = CliRunner().invoke(app, ["config", "show", "--config", write("tls-cert: x\n")])
    assert result.exit_code == 2 and "tls_key" in result.stderr


def test_the_examples_of_the_documentation(write: Write) -> None:
    (_, configuration), (_, probes) = blocks(ROOT / "docs/operations.md", "yaml")
    assert shown("--config", write(configuration))["log-level"][0] == "warning"
    paths = {probe["httpGet"]["path"] for probe in yaml.safe_load(probes).values()}
    assert paths == {"/health", "/live"}
