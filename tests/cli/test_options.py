"""Every field has an option and every option reaches its field: nothing is accepted and ignored."""

from __future__ import annotations

import dataclasses
import inspect
import os
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from reference import commands
from typer.main import get_command
from typer.testing import CliRunner

from headrace.cli.options import ENGINE_OPTIONS, SAMPLING_OPTIONS, Group, command, int_or_auto
from headrace.cli.serve import SERVER_OPTIONS
from headrace.config import EngineArgs
from headrace.errors import ConfigError, RequestError
from headrace.option_groups import KVEventsConfig, MediaCounts, StructuredOutputsConfig, WeightTransferConfig
from headrace.options import Option
from headrace.sampling_params import SamplingParams, StructuredOutputsParams
from headrace.server.settings import ServerSettings

OTHER: dict[str, tuple[list[str], Any]] = {
    "weight_transfer_config": (['{"backend": "gloo"}'], WeightTransferConfig(backend="gloo")),
    "weight_root": (["/weights"], Path("/weights")),
    "max_model_len": (["321"], 321),
    "kv_cache_memory": (["2GiB"], 2 * 2**30),
    "max_body_bytes": (["3MiB"], 3 * 2**20),
    "logit_bias": (['{"5": -1.5}'], {5: -1.5}),
    "allowed_token_ids": (["1,2,3"], [1, 2, 3]),
    "stop_token_ids": (["4,5"], [4, 5]),
    "layers_to_patch": (["0,1"], [0, 1]),
    "structured_outputs": (['{"regex": "[ab]+"}'], StructuredOutputsParams(regex="[ab]+")),
    "limit_mm_per_prompt": (['{"image": 2}'], MediaCounts(image=2)),
    "structured_outputs_config": (['{"max_depth": 9}'], StructuredOutputsConfig(max_depth=9)),
    "temperature": (["0.25"], 0.25),
    "top_p": (["0.25"], 0.25),
    "min_p": (["0.25"], 0.25),
    "gpu_memory_utilization": (["0.25"], 0.25),
    "sparse_threshold": (["0.25"], 0.25),
    "kv_events_config": (['{"topic": "kv"}'], KVEventsConfig(topic="kv")),
    "elastic_max_exact_tokens": (["512"], 512),
    "tls_cert": ([__file__], Path(__file__)),
    "tls_key": ([__file__], Path(__file__)),
    "codex_instructions": ([__file__], Path(__file__)),
    "model_alias": (["claude-*=m"], ("claude-*=m",)),
    "lora_modules": (["a=first", "b=second"], ("a=first", "b=second")),
    "lora_root": (["something"], Path("something")),
    "tool_call_parser": (["hermes"], "hermes"),
    "reasoning_parser": (["qwen3"], "qwen3"),
    "chat_template": (["{{ messages }}"], "{{ messages }}"),
}
"""Words and value of fields for which a made-up value would not do."""

COMPANIONS = {
    "tls_cert": ["--tls-key", __file__],
    "tls_key": ["--tls-cert", __file__],
    "model_alias": ["--served-model-name", "m"],
    "min_tokens": ["--max-tokens", "9999"],
    "stop": ["--detokenize"],
    "dp_queue_timeout": ["--data-parallel-size", "2"],
    "heal_from_sibling": ["--data-parallel-size", "2"],
}
"""Options without which a field's value is refused."""

ONLY = {
    "pipeline_parallel_size": ("1", "2", "ranks are faster"),
    "nnodes": ("1", "2", "headrace.deploy"),
    "distributed_executor_backend": ("uni", "ray", "headrace.deploy"),
    "data_parallel_backend": ("mp", "ray", "headrace.deploy"),
    "data_parallel_size_local": ("1", "2", "headrace.deploy"),
}
"""Options of vLLM for what there is not, a value that says so, another, and what its refusal names."""


def sample(option: Option) -> tuple[list[str], Any]:
    """Words for the command line, and the value that they must give: none of them the default."""
    if option.name in OTHER:
        return OTHER[option.name]
    hint = option.type
    if hint is bool:
        return [], not option.default_value
    if typing.get_origin(hint) is typing.Literal:
        other = next(value for value in typing.get_args(hint) if value != option.default_value)
        return [other], other
    if typing.get_origin(hint) in (tuple, list):
        return ["first", "second"], typing.get_origin(hint)(["first", "second"])
    if hint is int:
        return ["7"], 7
    if hint is float:
        return ["1.75"], 1.75
    return ["something"], "something"


def made(group: Group[Any]) -> tuple[Callable[..., Any], list[Any]]:
    """A command with this group, and the list of what it is called with."""
    seen: list[Any] = []

    def run(thing: Any) -> None:
        seen.append(thing)

    typed = typer.Typer()
    typed.command()(command(thing=group)(run))
    return get_command(typed), seen


COMMANDS: dict[int, tuple[Callable[..., Any], list[Any]]] = {}
"""Commands that ``made`` has made, by the id of their group. Making one takes longer than testing one of its options."""


def parsed(group: Group[Any], words: list[str]) -> Any:
    """Returns the object that a command with this group gets."""
    if id(group) not in COMMANDS:
        COMMANDS[id(group)] = made(group)
    run, seen = COMMANDS[id(group)]
    assert not run(words, standalone_mode=False)
    return seen.pop()


def words_for(option: Option, values: list[str]) -> list[str]:
    if option.spec.positional:
        return values
    flag = option.spec.flags[0] if option.spec.flags else "--" + option.name.replace("_", "-")
    if not values:
        return ["--no-" + flag[2:] if option.default_value else flag]
    return [word for value in values for word in (flag, value)]


GROUPS = (ENGINE_OPTIONS, SERVER_OPTIONS, SAMPLING_OPTIONS)
CASES = [(group, option) for group in GROUPS for option in group.options]
FREE = [(group, option) for group, option in CASES if option.name not in ONLY]


@pytest.mark.parametrize(("group", "option"), FREE, ids=lambda case: getattr(case, "name", ""))
def test_each_option_reaches_its_field(group: Group[Any], option: Option) -> None:
    values, expected = sample(option)
    built = parsed(group, words_for(option, values) + COMPANIONS.get(option.name, []))
    got = built[option.name] if isinstance(built, dict) else getattr(built, option.name)
    assert got == expected and type(got) is type(expected)


@pytest.mark.parametrize("words", ['{"image": 2, "video": 0}', "image=2,video=0", "image=2, video=0"])
def test_fields_of_an_object_may_be_pairs(words: str) -> None:
    assert parsed(ENGINE_OPTIONS, ["--limit-mm-per-prompt", words]).limit_mm_per_prompt == MediaCounts(image=2, video=0)


def test_names_of_vllm() -> None:
    assert parsed(ENGINE_OPTIONS, ["--allowed-local-media-path", "/media"]).allowed_media_path == "/media"


def test_an_unknown_field_of_an_object_is_a_mistake_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match="depth is not a parameter") as caught:
        EngineArgs(limit_mm_per_prompt={"depth": 1})
    assert caught.value.param == "limit_mm_per_prompt.depth"


@pytest.mark.parametrize("name", ONLY)
def test_what_is_not_there_can_be_denied_and_is_refused(name: str) -> None:
    denied, asked, reason = ONLY[name]
    flag = f"--{name.replace('_', '-')}"
    value = getattr(parsed(ENGINE_OPTIONS, [flag, denied]), name)
    assert str(value) == denied
    with pytest.raises(ConfigError, match=rf"{name} must be .*, not {asked}\. .*{reason}") as refused:
        EngineArgs(**{name: type(value)(asked)})
    assert refused.value.param == name


def test_vllms_names_fit_several_ranks_and_replicas() -> None:
    given = ["-tp", "2", "-dp", "2", "-pp", "1", "--data-parallel-size-local", "2", "--distributed-executor-backend", "mp"]
    args = parsed(ENGINE_OPTIONS, [*given, "--data-parallel-backend", "mp", "--nnodes", "1"])
    assert (args.tensor_parallel_size, args.data_parallel_size) == (2, 2)
    with pytest.raises(ConfigError, match="distributed_executor_backend must be mp, not uni"):
        EngineArgs(tensor_parallel_size=2, distributed_executor_backend="uni")


@pytest.mark.parametrize(
    ("group", "fields"),
    [
        (ENGINE_OPTIONS, [field.name for field in dataclasses.fields(EngineArgs)]),
        (SERVER_OPTIONS, [field.name for field in dataclasses.fields(ServerSettings)]),
        (SAMPLING_OPTIONS, list(SamplingParams.__struct_fields__)),
    ],
    ids=["engine", "server", "sampling"],
)
def test_each_field_has_one_option(group: Group[Any], fields: list[str]) -> None:
    assert sorted(option.name for option in group.options) == sorted(fields)


@pytest.mark.parametrize(("group", "option"), CASES, ids=lambda case: getattr(case, "name", ""))
def test_each_help_teaches(group: Group[Any], option: Option) -> None:
    help = option.help
    assert help[-1] in ".:" and len(help) >= 20
    assert "default" not in help.lower() or option.name == "host"


def test_nothing_given_is_the_class_itself() -> None:
    assert parsed(ENGINE_OPTIONS, []) == EngineArgs()
    assert parsed(SERVER_OPTIONS, []) == ServerSettings()
    assert parsed(SAMPLING_OPTIONS, []) == {}


def test_defaults_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_MAX_BAD_WORDS_NUM", "3")
    assert parsed(ENGINE_OPTIONS, []).max_bad_words_num == 3
    assert parsed(ENGINE_OPTIONS, ["--max-bad-words-num", "5"]).max_bad_words_num == 5


@pytest.mark.parametrize(("name", "function"), list(commands()))
def test_no_flag_is_taken_twice(name: str, function: Any) -> None:
    seen: set[str] = set()
    for parameter in inspect.signature(function).parameters.values():
        info = parameter.annotation.__metadata__[0]
        for flag in [info.default, *(info.param_decls or ())]:
            if isinstance(flag, str) and flag.startswith("-"):
                assert flag not in seen, f"{name}: {flag}"
                seen.add(flag)


@pytest.mark.parametrize(
    "words",
    ["--max-model-len 0", "--max-model-len long", "--dtype float8", "--num-threads 0", "--block-size many", "--nonsense"],
)
def test_a_bad_word_is_a_usage_error(words: str) -> None:
    typed = typer.Typer()
    typed.command()(command(args=ENGINE_OPTIONS)(lambda args: None))
    assert CliRunner().invoke(typed, words.split()).exit_code == 2


def failing(error: Exception) -> typer.Typer:
    def run() -> None:
        raise error

    typed = typer.Typer(pretty_exceptions_enable=False)
    typed.command()(command()(run))
    return typed


@pytest.mark.parametrize("error", [ConfigError("does not fit", "block_size"), RequestError("does not fit", "block_size")])
def test_errors_are_one_line_that_names_the_parameter(error: Exception) -> None:
    result = CliRunner().invoke(failing(error), [])
    assert result.exit_code == 2
    assert result.stderr.strip() == "error: block_size: does not fit"
    result = CliRunner().invoke(failing(error), ["--debug"])
    assert result.exception is error


def test_the_help_answers_at_once() -> None:
    """Modules that would make the help slow are not imported. No timing: that would be the machine's."""
    code = "import sys, headrace.cli.main; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'fastapi')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_parsers() -> None:
    assert int_or_auto("auto") == "auto" and int_or_auto("12") == 12
    for text in ("1.5", "many", ""):
        with pytest.raises(ValueError, match="whole number nor 'auto'"):
            int_or_auto(text)


def test_an_environment_that_makes_no_sense_is_told_of_in_a_line() -> None:
    environment = os.environ | {"HEADRACE_MAX_STOP_SEQS_NUM": "lots"}
    done = subprocess.run(
        [sys.executable, "-m", "headrace.cli", "serve", "--help"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == "headrace: the environment's HEADRACE_MAX_STOP_SEQS_NUM must be a whole number, not 'lots'\n"


@pytest.mark.parametrize(
    ("name", "word", "hint"),
    [
        ("model_impl", "paddlefleet", "LLM.from_megatron"),
        ("model_impl", "paddleformers", "write transformers"),
        ("dtype", "bf16", "write bfloat16"),
        ("kv_cache_dtype", "fp8", "write fp8_e4m3"),
        ("quantization", "wint4", "write int4"),
        ("load_format", "pt", "convert the checkpoint"),
        ("dp_routing_policy", "cache_aware", "write prefix"),
        ("grammar_backend", "xgrammar", "llguidance"),
        ("dtype", "floot32", "did you mean float32?"),
    ],
)
def test_words_of_other_engines_are_refused_with_ours(name: str, word: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        EngineArgs(**{name: word})
    typed = typer.Typer()
    typed.command()(command(thing=ENGINE_OPTIONS)(lambda thing: None))
    result = CliRunner().invoke(typed, ["--" + name.replace("_", "-"), word])
    assert result.exit_code == 2 and hint.split()[0] in result.output, result.output


def test_no_hint_is_for_a_word_that_is_taken() -> None:
    for group in GROUPS:
        for option in group.options:
            assert not set(option.spec.hints or ()) & set(typing.get_args(option.type)), option.name
