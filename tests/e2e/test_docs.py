"""The examples of README.md and docs/: blocks of Python are executed, requests with curl are sent, command lines are parsed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shlex
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
import typer
from support.models import tiny_llama, tiny_pooling, tiny_vision
from support.models.adapters import write_adapter
from support.pages import ROOT, blocks, command_lines, pages, run_blocks
from support.server.running import Server, start_server, stop_server
from transformers import AutoModelForCausalLM

from headrace import LLM, SamplingParams
from headrace.cli.main import app
from headrace.config import EngineArgs
from headrace.core.plan import SamplePlan

ADDRESS = "http://127.0.0.1:8000"
Context = Callable[[Path], contextlib.AbstractContextManager[tuple[dict[str, Any], dict[str, str]]]]
"""Given a checkpoint, the names that the blocks of a page need, and what replaces parts of their text."""


@contextlib.contextmanager
def nothing(_: Path) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    yield {}, {}


@contextlib.contextmanager
def trained_model(checkpoint: Path) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    model = f"model={str(checkpoint)!r}"
    replacements = {"AsyncLLM()": f"AsyncLLM(EngineArgs({model}))", "LLM()": f"LLM({model})"}
    replacements["path/to/checkpoint"] = str(checkpoint)
    yield {"policy": AutoModelForCausalLM.from_pretrained(checkpoint), "EngineArgs": EngineArgs}, replacements


@contextlib.contextmanager
def one_step(checkpoint: Path) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    with LLM(model=str(checkpoint), num_kv_blocks=16) as llm:
        core = llm._engine.core
        core.add(llm.inputs.request("The mill", SamplingParams(max_tokens=1), request_id="a"))
        names = {"scheduler": core.scheduler, "executor": core.executor, "outputs": core.outputs, "SamplePlan": SamplePlan}
        yield names, {}
        assert [delta.finish_reason for delta in names["deltas"]] == ["length"]
        assert not core.has_work()


@contextlib.contextmanager
def foreign_layer(_: Path) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    from models.fallback import test_contract as contract

    from headrace.models.fallback.layout import MEGATRON

    q, k, v = contract.qkv()
    names = {"spec": contract.spec(), "context": contract.context(contract.spec(), len(q)), "sinks": None}
    names |= {name: MEGATRON.unpack(tensor) for name, tensor in (("q", q), ("k", k), ("v", v))}
    yield names, {}
    torch.testing.assert_close(MEGATRON.pack(names["out"], "out", "the page"), contract.by_hand(q, k, v, 0.3))


@contextlib.contextmanager
def trainer(_: Path) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'headrace[megatron]'")
    from support.models import megatron

    model = megatron.gpt()
    trained: list[int] = []
    names = {"model": model, "config": model.config, "tokenizer": None, "prompts": [{"prompt_token_ids": [3, 14, 15]}]}
    names |= {"steps": 2, "train": lambda _, rollouts: trained.append(len(rollouts[0].outputs))}
    yield names, {"max_model_len=8192": "max_model_len=64", "8 * 2**30": "2**20", "max_tokens=1024": "max_tokens=4"}
    assert trained == [8, 8]
    assert names["report"].passed


@contextlib.contextmanager
def pictures(checkpoint: Path) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    folder = checkpoint.parent / "pictures"
    tiny_vision.save("qwen2_5_vl", folder)
    tiny_vision.save("qwen2_audio", checkpoint.parent / "audio")
    names: dict[str, Any] = {}
    small = "num_kv_blocks=64, max_model_len=512"
    yield (
        names,
        {
            '"Qwen/Qwen2.5-VL-7B-Instruct"': f"{str(folder)!r}, {small}",
            '"Qwen/Qwen2-Audio-7B-Instruct"': f"{str(checkpoint.parent / 'audio')!r}, {small}",
        },
    )
    assert len(names["output"].outputs[0].token_ids) > 0


@contextlib.contextmanager
def embedder(checkpoint: Path) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    folder, reranker = checkpoint.parent / "embedder", checkpoint.parent / "Qwen3-Reranker-tiny"
    wide = {"hidden_size": 256, "max_position_embeddings": 1024}
    tiny_pooling.write_pooling_model(folder, "Qwen3Model", **wide)
    tiny_pooling.write_modules(folder)
    tiny_pooling.write_pooling_model(reranker, **wide)
    names: dict[str, Any] = {}
    small = "num_kv_blocks=100"
    yield (
        names,
        {
            '"Qwen/Qwen3-Embedding-0.6B"': f"{str(folder)!r}, {small}",
            '"Qwen/Qwen3-Reranker-0.6B"': f"{str(reranker)!r}, {small}",
        },
    )
    assert len(names["documents"][0].outputs.embedding) == 256
    assert all(0 < output.outputs.score < 1 for output in names["outputs"])


@contextlib.contextmanager
def two_ranks(checkpoint: Path) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    yield {}, {'LLM("Qwen/Qwen3-8B"': f'LLM({str(checkpoint)!r}, device="cpu", num_kv_blocks=16, num_threads=2'}


@contextlib.contextmanager
def free_ports(checkpoint: Path) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = {f":{port}": f":{free.getsockname()[1]}" for port, free in ((5557, one), (5558, other))}
    names: dict[str, Any] = {}
    yield names, {"LLM(": f"LLM({str(checkpoint)!r}, ", **ports}
    assert names["event"]["type"] == "BlockStored"


@contextlib.contextmanager
def adapters(checkpoint: Path) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    poet = write_adapter(checkpoint, checkpoint.parent / "poet")
    names: dict[str, Any] = {}
    yield names, {'"Qwen/Qwen3-0.6B"': f"{str(checkpoint)!r}, num_kv_blocks=40", '"adapters/poet"': repr(str(poet))}
    with_adapter, without = (result.outputs[0].token_ids for result in names["results"])
    assert with_adapter != without


@contextlib.contextmanager
def training(checkpoint: Path) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    policy = AutoModelForCausalLM.from_pretrained(checkpoint)

    def train(policy: Any, rollouts: Any) -> None:
        with torch.no_grad():
            for weight in policy.parameters():
                weight.add_(0.01 * torch.randn_like(weight))

    names: dict[str, Any] = {"policy": policy, "train": train, "PROMPTS": ["The mill", "A wheel"]}
    small = f"model={str(checkpoint)!r}, num_kv_blocks=64"
    yield names, {'model="path/to/checkpoint"': small, "/dev/shm": str(checkpoint.parent), "max_tokens=32": "max_tokens=4"}
    first, second, third = (names[name][0].outputs[0].token_ids for name in ("first", "second", "third"))
    assert first == second != third
    spans = [[(span.version, span.start) for span in sample] for sample in names["versions"]]
    assert spans == [[(version, 0)] for version in ("0", "0", "1") for _ in range(4)]


@contextlib.contextmanager
def several_models(checkpoint: Path) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """The page's server, with small models in place of its own."""
    embedder, config, log = (checkpoint.parent / name for name in ("embedder", "models.yaml", "log.txt"))
    tiny_pooling.write_pooling_model(embedder, "Qwen3Model", hidden_size=64, max_position_embeddings=256)
    tiny_pooling.write_modules(embedder)
    [(_, text)] = blocks(ROOT / "docs" / "several-models.md", "yaml")
    paths = {"Qwen/Qwen3-0.6B": checkpoint, "Qwen/Qwen3-Embedding-0.6B": embedder, "2GiB": "2MiB", "512MiB": "2MiB"}
    for shown, used in paths.items():
        text = text.replace(shown, str(used))
    config.write_text(text)
    # Room for one of them.
    server = start_server(log, "--models-config", str(config), "--models-memory", "3MiB", "--ready-timeout", "240")
    names: dict[str, Any] = {}
    try:
        server.wait_healthy()
        yield names, {ADDRESS: server.url}
        assert len(names["vectors"].data[0].embedding) == 64 and names["answer"].usage.completion_tokens > 0
        states = {card["id"]: card["state"] for card in names["cards"]}
        assert states == {"small": "idle", **dict.fromkeys(("vectors", "embeddings", "text-embedding-3-small"), "loaded")}
        assert [model["name"] for model in names["loaded"]] == ["small"]
        assert names["unloaded"]["done_reason"] == "unload"
    finally:
        processes = psutil.Process(server.process.pid).children(recursive=True)
        assert stop_server(server) == 0, log.read_text()
        assert not psutil.wait_procs(processes, 30)[1]
    assert log.read_text().count(": loaded small") == 2 and "Traceback" not in log.read_text()


CONTEXTS: dict[str, Context] = {
    "architecture.md": one_step,
    "embeddings.md": embedder,
    "foreign-models.md": foreign_layer,
    "megatron.md": trainer,
    "multimodal.md": pictures,
    "parallel.md": two_ranks,
    "lora.md": adapters,
    "python.md": trained_model,
    "replicas.md": free_ports,
    "rl.md": training,
    "several-models.md": several_models,
    "structured-output.md": trained_model,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.write_model(tmp_path_factory.mktemp("checkpoint"))


TESTED_ELSEWHERE = ("add-a-model.md", "attention-backends.md")
"""Pages that tests/models/test_guide.py and tests/attention/test_guide.py test, which also check results."""


SLOW = ("several-models.md", "elastic-attention.md", "parallel.md", "replicas.md", "rl.md", "structured-output.md")
"""Pages whose examples need a server or engines of their own."""


def python_pages() -> list[Any]:
    return [
        pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.name in SLOW else [])
        for page in pages()
        if blocks(page, "python") and page.name not in TESTED_ELSEWHERE
    ]


@pytest.mark.parametrize("page", python_pages())
def test_python(page: Path, checkpoint: Path, server: Server) -> None:
    with CONTEXTS.get(page.name, nothing)(checkpoint) as (names, replacements):
        run_blocks(page, names, {ADDRESS: server.url, **replacements})


def curl_examples() -> list[tuple[str, str]]:
    return [(page.name, line) for page in pages() for line in command_lines(page, "curl")]


@pytest.mark.parametrize(("page", "line"), curl_examples())
def test_curl(page: str, line: str, server: Server) -> None:
    words, headers, body, url = shlex.split(line)[1:], {}, None, ""
    while words:
        word = words.pop(0)
        if word == "-H":
            name, _, value = words.pop(0).partition(": ")
            headers[name] = value
        elif word == "-d":
            body = words.pop(0)
        else:
            assert word.startswith("http"), f"{page}: the test does not know curl's {word}"
            url = word.replace(ADDRESS, server.url)
    if url.endswith("/api/chat") and body is not None:  # Without a limit, the answer may take the context.
        body = json.dumps(json.loads(body) | {"options": {"num_predict": 16}})
    answer = httpx.request("GET" if body is None else "POST", url, headers=headers, content=body, timeout=120)
    assert answer.is_success, answer.text


def command_examples() -> list[tuple[str, str]]:
    return sorted({(page.name, line) for page in pages() for line in command_lines(page, "headrace")})


@pytest.fixture(scope="module")
def program() -> Any:
    return typer.main.get_command(app)


@pytest.mark.parametrize(("page", "line"), command_examples())
def test_command_line(page: str, line: str, program: Any) -> None:
    """Commands and options exist, and values convert."""
    words, command = shlex.split(line)[1:], program
    while hasattr(command, "commands") and words:
        command = command.commands[words.pop(0)]
    if not hasattr(command, "commands"):
        command.make_context(command.name, words).close()


def test_scripts_exist() -> None:
    programs = ("python", ".venv/bin/python")
    shown = [
        (page.name, shlex.split(line)) for page in pages() for program in programs for line in command_lines(page, program)
    ]
    assert shown
    for page, (_, script, *rest) in shown:
        if script == "-m" and not rest[0].startswith(("headrace.", "tests.")):
            assert importlib.util.find_spec(rest[0]), f"{page}: there is no module {rest[0]}"
        else:
            path = ROOT / (f"{rest[0].replace('.', '/')}.py" if script == "-m" else script)
            assert path.is_file(), f"{page}: there is no {path}"
