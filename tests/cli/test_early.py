"""Mistakes that need no weights are reported before anything heavy is imported, and once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli import options
from headrace.config import EngineArgs
from headrace.sampling_params import StructuredOutputsParams

COMMANDS = {
    "run": ["run", "--model", "MODEL", "hello"],
    "serve": ["serve", "MODEL", "--port", "0"],
    "chat": ["chat", "MODEL"],
    "doctor": ["doctor", "MODEL"],
    "encode": ["encode", "--model", "MODEL", "PICTURE"],
    "explain": ["explain", "MODEL", "--prompt", "hello"],
    "latency": ["bench", "latency", "MODEL"],
    "throughput": ["bench", "throughput", "MODEL"],
    "calibrate": ["bench", "calibrate", "MODEL"],
    "longcontext": ["bench", "longcontext", "MODEL"],
    "longbench": ["bench", "longbench", "MODEL", "--directory", "."],
}
PROGRAM = """
import json, sys
for heavy in ("torch", "transformers", "fastapi", "uvicorn", "headrace.processes.supervisor"):
    sys.modules[heavy] = None  # An import of it fails.
from typer.testing import CliRunner
from headrace.cli.main import app
results = [CliRunner().invoke(app, words) for words in json.loads(sys.argv[1])]
print(json.dumps([(result.exit_code, result.stderr) for result in results]))
"""


def outcomes(commands: list[list[str]]) -> list[tuple[int, str]]:
    command = [sys.executable, "-c", PROGRAM, json.dumps(commands)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return [(code, said) for code, said in json.loads(ended.stdout.splitlines()[-1])]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "picture.png").write_bytes(b"")
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    (tmp_path / "broken.jinja").write_text("{% if %}")
    (tmp_path / "qwen3").mkdir()
    return tmp_path


def test_a_mistyped_model(folder: Path) -> None:
    """Every command that runs a model refuses it."""
    names = {"MODEL": str(folder / "qwen33"), "PICTURE": str(folder / "picture.png")}
    found = outcomes([[names.get(word, word) for word in words] for words in COMMANDS.values()])
    for name, (code, said) in zip(COMMANDS, found, strict=True):
        assert code == 2, (name, said)
        assert said == f"error: there is no file or directory {folder / 'qwen33'}; did you mean {folder / 'qwen3'}?\n", name


MODELS = [
    ("./missing.gguf", "there is no file or directory ./missing.gguf"),
    ("no/such/folder", "there is no file or directory no/such/folder"),
    ("model.bin", "model.bin: pickled weights can run code when they are read, so they are not"),
    ("notes.txt", "notes.txt is a file, but not a GGUF file"),
]


def test_a_wrong_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in ("model.bin", "notes.txt"):
        (tmp_path / file).write_text("x")
    monkeypatch.chdir(tmp_path)
    found = outcomes([[command, name] for command in ("serve", "doctor") for name, _ in MODELS])
    for (code, said), (_, why) in zip(found, MODELS * 2, strict=True):
        assert code == 2 and why in " ".join(said.split()) and "listening" not in said


NAMES = [
    (["serve", "--tool-call-parser", "hermez"], "there is no format hermez; did you mean hermes?"),
    (["run", "--reasoning-parser", "qwen4", "hello"], "there is no format qwen4; did you mean qwen3?"),
    (["serve", "--chat-template", "FOLDER/templat.jinja"], "did you mean FOLDER/template.jinja?"),
    (["chat", "--chat-template", "FOLDER/templat.jinja"], "did you mean FOLDER/template.jinja?"),
    (["serve", "--chat-template", "FOLDER/broken.jinja"], "not valid Jinja: line 1"),
    (["chat", "--chat-template", "{% if %}"], "not valid Jinja: line 1"),
    (["serve", "--record-steps", "FOLDER/qwen/steps"], "there is no directory FOLDER/qwen; did you mean FOLDER/qwen3?"),
    (["run", "--record-steps", "FOLDER", "hello"], "cannot write FOLDER: it is a directory"),
]


def test_other_names(folder: Path) -> None:
    commands = []
    for words, _ in NAMES:
        named = [word.replace("FOLDER", str(folder)) for word in words]
        commands.append([*named, *(["qwen3"] if named[0] != "run" else ["--model", "qwen3"])])
    for (code, error), (words, said) in zip(outcomes(commands), NAMES, strict=True):
        assert code == 2 and error.count("error:") == 1, words
        assert said.replace("FOLDER", str(folder)) in error, words


SAMPLING = [
    (
        "--structured-outputs",
        '{"regex": "["}',
        'structured_outputs.regex: regex cannot be held: at 1(8): invalid regex "["',
    ),
    ("--structured-outputs", '{"json": {"type": "strin"}}', "structured_outputs.json: the schema at #/type: must be one"),
    ("--structured-outputs", '{"grammar": "start: a"}', "structured_outputs.grammar: grammar cannot be held"),
    ("--logprobs", "50", "logprobs asks for 50, and this engine gives at most 20 (max_logprobs)"),
    ("--stop", "a" * 4000, "stop has a string of 4000 characters"),
]


def test_sampling_options() -> None:
    """The process of the engine, which imports heavy things, is there, and gets no model."""
    commands = [["run", option, value, "hello"] for option, value, _ in SAMPLING]
    commands.append(["chat", "--structured-outputs", '{"regex": "["}'])
    said = [*(said for _, _, said in SAMPLING), "regex cannot be held"]
    for (code, error), words in zip(outcomes(commands), said, strict=True):
        assert code == 2 and error.startswith("error: ") and words in error


def test_a_constraint_that_names_tokens_is_left_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "spawn", lambda origin: None)
    grammar = {"grammar": 'start: <tool_call> "a" </tool_call>'}
    options.spawn_checked(EngineArgs(), {"structured_outputs": StructuredOutputsParams(**grammar)})
