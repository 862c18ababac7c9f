"""The short help, the whole help, and the option names of other engines."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from reference import commands
from typer import rich_utils
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.cli.peer_options import ALWAYS, REFUSED, SAME, translated

COMMANDS = dict(commands())
WITH_SHORT_HELP = [name for name in COMMANDS if name != "headrace config show"]


def flags(function: object) -> set[str]:
    infos = [p.annotation.__metadata__[0] for p in inspect.signature(function).parameters.values()]
    words = [word for info in infos for word in (info.default, *(info.param_decls or ())) if isinstance(word, str)]
    return {flag for word in words for flag in word.split("/")}


def helped(name: str, flag: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rich_utils, "MAX_WIDTH", 200)
        return CliRunner().invoke(app, [*name.split()[1:], flag], env={"COLUMNS": "80"}).output


@pytest.mark.parametrize("name", WITH_SHORT_HELP)
def test_help_fits_a_screen_and_all_of_it_is_to_be_had(name: str) -> None:
    assert len(helped(name, "--help").splitlines()) <= 48
    whole = helped(name, "--help-all")
    long = {flag for flag in flags(COMMANDS[name]) if flag.startswith("--") and not flag.startswith("--no-")}
    assert {flag for flag in long if len(flag) < 18 and flag != "--tp"} <= set(whole.replace("/", " ").split())
    assert helped(name, "--help") == helped(name, "--help")


SERVE = flags(COMMANDS["headrace serve"])


def test_no_name_of_other_engines_is_one_of_ours() -> None:
    for names in (SAME, ALWAYS, REFUSED):
        assert not SERVE & names.keys()
    assert {flag.partition("=")[0] for flag in SAME.values()} <= SERVE
    assert not (SAME.keys() & ALWAYS.keys() or SAME.keys() & REFUSED.keys() or ALWAYS.keys() & REFUSED.keys())
    named = {word.strip("`,;.") for text in REFUSED.values() for word in text.split() if word.startswith("--")}
    assert {word for word in named if word.startswith("--")} <= SERVE


def test_every_option_of_vllms_server_is_known_or_refused() -> None:
    names = (Path(__file__).parent / "vllm_options.txt").read_text().split()
    assert len(names) > 240
    assert [name for name in names if name not in SERVE | SAME.keys() | ALWAYS.keys() | REFUSED.keys() | {"--model"}] == []


def error(*words: str) -> str:
    result = CliRunner().invoke(app, ["serve", *words])
    assert result.exit_code == 2
    return " ".join(result.stderr.split())


def test_options_of_other_engines() -> None:
    assert "--swap-space: a preempted sequence is computed again" in error("--swap-space", "4")
    assert "tensor_parallel_size must be an integer in [1, 64], not 0" in error("--tp-size", "0")
    assert "tensor_parallel_size must be" in error("--enable-chunked-prefill", "--tp-size=0", "--cont-batching")
    assert "/metrics is always there" in error("--enable-metrics=1")
    assert translated(["--enable-fp32-lm-head"], SERVE) == ["--head-dtype=float32"]
    assert "--nonsense" in error("--nonsense")


def test_the_model_may_be_named_as_elsewhere() -> None:
    """vLLM's and SGLang's servers have an option where headrace has an argument."""
    for words in (["--model", "Qwen/Qwen3-0.6B"], ["--model-path=Qwen/Qwen3-0.6B"]):
        assert translated([*words, "--port", "1"], SERVE) == ["Qwen/Qwen3-0.6B", "--port", "1"]
    assert translated(["--model", "a"], {"--model"}) == ["--model", "a"], "headrace run has it"
    for words in (["one", "two"], ["--model", "one", "--model", "two"], ["one", "--model", "two"]):
        assert "two: a command serves one MODEL; --models-config FILE serves several" in error(*words)
    # A value, and what follows --, is not an option.
    assert "there is no file" in error("--served-model-name", "x", "--", "./--swap-space")


def test_a_command_imports_no_other() -> None:
    """Commands start their engine's process as soon as their own options are read."""
    script = (
        "import sys; from headrace.cli.main import COMMANDS, command_of; command_of('serve');"
        "print([name for name, (path, _) in COMMANDS.items() if path.partition(':')[0] in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "['serve']\n"
