"""Requests of clients who mean well, who do not, and who leave."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx

from headrace.server.fields import FIELDS

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
ODD = [
    *(None, True, False, "", "a", "\x00", "é\ud800", "nan", "x" * 3000, [], {}, [[]], [None], {"a": {}}, ["a"] * 40),
    *(-1, 0, 1, 2**31, 2**63, -(2**63), 2**70, 0.0, -0.0, 5e-324, 1e-38, 3.4e38, 1e300, -1e300, 0.5, list(range(300))),
]
NAMES = sorted({rule.name for rule in FIELDS} | {"messages", "tokens", "text", "data", "modality", "no_such_field"})
CONSTRAINTS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "a": [{}] * 50}}}},
    {"structured_outputs": {"regex": "(a|b)*c{1,900}"}},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"structured_outputs": {"grammar": "start: start start"}},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}], "tool_choice": "auto"},
]


def plausible(chance: random.Random) -> dict[str, Any]:
    """Fields of a request that is served."""
    fields: dict[str, Any] = {
        "max_tokens": chance.randint(1, 24),
        "temperature": chance.choice([0, 0.7, 1.5]),
        "n": chance.choice([1, 1, 1, 3]),
        "stream": chance.random() < 0.5,
        "top_p": chance.choice([1, 0.9]),
        "top_k": chance.choice([-1, 5]),
        "repetition_penalty": chance.choice([1, 1.3]),
        "stop": chance.choice([None, ["ab"], ["zz", "q" * 30]]),
        "seed": chance.choice([None, 7]),
        "ignore_eos": chance.random() < 0.3,
    }
    return {name: fields[name] for name in chance.sample(sorted(fields), chance.randint(1, len(fields)))}


def served(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """(path, body) of a request without faults."""
    text = "".join(chance.choice("abcdef \n") for _ in range(chance.randint(1, 200)))
    messages = [{"role": "user", "content": text}]
    return chance.choice(
        [
            ("/v1/completions", {"prompt": text, "max_tokens": 4} | plausible(chance)),
            ("/v1/completions", {"prompt": text, "max_tokens": 4} | plausible(chance)),
            ("/v1/chat/completions", {"messages": messages, "max_tokens": 4} | plausible(chance)),
            ("/v1/messages", {"messages": messages, "max_tokens": 4}),
            ("/v1/messages/count_tokens", {"messages": messages}),
            ("/v1/responses", {"input": text, "max_output_tokens": 4}),
            ("/tokenize", {"prompt": text}),
            ("/detokenize", {"tokens": [chance.randrange(256) for _ in range(5)]}),
            ("/v1/features", {"modality": "image", "data": "AAAA"}),
        ]
    )


def fuzzed(chance: random.Random) -> tuple[str, bytes]:
    """(path, body): a request with some fields that are wrong, or a body that is not a request."""
    path, body = served(chance)
    if path.startswith("/v1") and chance.random() < 0.1:
        body |= chance.choice(CONSTRAINTS)
    for _ in range(chance.choice([0, 1, 1, 2, 3])):
        body[chance.choice(NAMES)] = chance.choice(ODD)
    encoded = json.dumps(body, ensure_ascii=True).encode()
    if chance.random() < 0.05:
        broken = bytearray(encoded)
        broken[chance.randrange(len(broken))] = chance.randrange(256)
        return path, bytes(broken)
    return path, encoded


async def leave(http: httpx.AsyncClient, chance: random.Random) -> None:
    """Reads a few events of a stream and closes the connection."""
    prompt, n = "leave " * chance.randint(1, 40), chance.choice([1, 4])
    body = {"prompt": prompt, "max_tokens": 400, "stream": True, "n": n, "ignore_eos": True}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.aiter_lines()
        for _ in range(chance.randint(0, 20)):
            if await anext(lines, None) is None:
                return


async def work_hard(http: httpx.AsyncClient, chance: random.Random) -> None:
    """A small or legal request that asks for much work."""
    match chance.randrange(7):
        case 0:
            path, body = "/tokenize", {"prompt": "ab " * 300_000}
        case 1:
            path, body = "/v1/completions", {"prompt": "a", "stop_token_ids": list(range(200_000)), "n": 8}
        case 2:
            path, body = "/v1/completions", {"prompt": "a", "allowed_token_ids": list(range(250)) * 200, "n": 16}
        case 3:
            path, body = "/v1/chat/completions", {"messages": [1] * 200_000}
        case 4:
            messages, kwargs = [{"role": "user", "content": "a"}], {"items": [{} for _ in range(200_000)]}
            path, body = "/v1/chat/completions", {"messages": messages, "chat_template_kwargs": kwargs}
        case 5:
            path, body = "/v1/completions", {"prompt": "long " * 300, "prompt_logprobs": 20, "n": 16}
        case _:
            path, body = "/v1/completions", {"prompt": [1] * 500_000}
    response = await http.post(path, json={"max_tokens": 2} | body)
    assert response.status_code < 500, (path, response.status_code, response.text[:300])


async def stall(host: str, port: int, chance: random.Random) -> None:
    """Sends a part of a request, waits, and leaves."""
    whole = POST + b"Content-Type: application/json\r\nContent-Length: 100000\r\n\r\n" + b" " * 100_000
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(whole[: chance.choice([1, 30, 80, 150, 50_000])])
        await writer.drain()
        async with asyncio.timeout(chance.uniform(0.1, 20)):
            await reader.read()
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.close()


async def speak_oddly(host: str, port: int, chance: random.Random) -> None:
    """Sends what is not quite HTTP, or more of it than is allowed."""
    sent = chance.choice(
        [
            b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 2_000_000 + b"\r\n\r\n",
            b"GET /" + b"a" * 300_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
            b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"H%d: v\r\n" % number for number in range(20_000)) + b"\r\n",
            b"\x16\x03\x01\x02\x00" + chance.randbytes(500),
            b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 50,
            POST + b"Content-Type: application/json;a=" + b";" * 50_000 + b"\r\nContent-Length: 2\r\n\r\n{}",
            POST + b"Transfer-Encoding: chunked\r\n\r\nffffffff\r\n" + b"a" * 10_000,
            b"HEAD /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
        ]
    )
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(sent)
        await writer.drain()
        async with asyncio.timeout(5):
            await reader.read()
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.close()
