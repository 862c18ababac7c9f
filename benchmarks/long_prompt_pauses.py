"""Measures the gaps between tokens of running requests while one long prompt is computed beside them.

    python benchmarks/long_prompt_pauses.py MODEL --output pauses.json
    python benchmarks/long_prompt_pauses.py MODEL --cases xa-ssa --beside 4096 --clients 32

MODEL is a folder with the config.json of a dense Qwen3 or Llama; its weights are random. Starts `headrace serve` for each case:
`dense` is the model itself, whose prompt is computed in chunks of tokens, and the modes of sparse_ttft.py are its form with a
router, whose prompt is one piece and advances by layers. --clients requests stream; when all of them do, a prompt of --length
tokens arrives, and its first token ends the measurement. With --beside, each case also runs with that value of
--max-prefill-tokens-beside-decode. Random routers divide the heads at random: the report has their density.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

import httpx  # noqa: E402
from sparse_ttft import DENSE, MODES, folder_of  # noqa: E402
from support.server.running import start_server, stop_server  # noqa: E402

from headrace.bench.report import facts, load_average  # noqa: E402
from headrace.metrics.exchanges import distribution  # noqa: E402

OPTIONS = ("--load-format", "dummy", "--skip-tokenizer-init", "--no-enable-prefix-caching")
PROMPT = 512
"""Tokens of a streaming request's prompt."""
STREAM = 20_000
"""Tokens of its answer at most: more than it gets in a measurement."""
ALONE = 3.0
"""Seconds in which the streams run alone."""
Json = dict[str, Any]


async def stream(client: httpx.AsyncClient, tokens: list[int], seed: int, gaps: list[tuple[float, float]]) -> None:
    """Reads one stream until it is cancelled; ``gaps``: (end, length) of each gap, in seconds."""
    body = {"prompt": tokens, "max_tokens": STREAM, "ignore_eos": True, "stream": True, "seed": seed, "return_token_ids": True}
    last = None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                now = time.perf_counter()
                if last is not None:
                    gaps.append((now, now - last))
                last = now
    raise RuntimeError(f"a stream ended: {response.status_code}")


async def measure(url: str, clients: int, length: int, vocab_size: int) -> Json:
    """Gaps of the streams alone and beside the prompt, in milliseconds, and the prompt's seconds to its first token."""
    rng = random.Random(0)
    gaps: list[tuple[float, float]] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        def drawn(count: int) -> list[int]:
            return [rng.randrange(vocab_size) for _ in range(count)]

        async def first_token() -> Json:
            body = {"prompt": drawn(length), "max_tokens": 1, "ignore_eos": True, "return_attention_report": True}
            response = await client.post("/v1/completions", json=body)
            response.raise_for_status()
            answer: Json = response.json()
            return answer

        await first_token()  # compiles kernels
        streams = asyncio.gather(*(stream(client, drawn(PROMPT), index, gaps) for index in range(clients)))
        while len(gaps) < 20 * clients:
            if streams.done():
                streams.result()
            await asyncio.sleep(0.05)
        alone = time.perf_counter()
        await asyncio.sleep(ALONE)
        start = time.perf_counter()
        answer = await first_token()
        end = time.perf_counter()
        streams.cancel()
        await asyncio.gather(streams, return_exceptions=True)
    row: Json = {"first token, s": round(end - start, 3), "density": answer.get("attention", {}).get("density")}
    for name, since, until in (("alone", alone, start), ("beside", start, end)):
        lengths = [gap for ended, gap in gaps if since <= ended < until]
        row[f"{name}, ms"] = {**distribution(lengths), "tokens": len(lengths)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    modes = [name for name, mode in MODES.items() if mode.heads is not None]
    parser.add_argument("--cases", nargs="+", choices=[DENSE, *modes], default=[DENSE, "xa-ssa"])
    parser.add_argument("--beside", type=int, help="a second run of each case with this many prompt tokens beside decode")
    parser.add_argument("--length", type=int, default=131072 - 256, help="tokens of the long prompt")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--output", type=Path, help="write the results there as JSON")
    parser.add_argument("--serve", type=shlex.split, default=[], help="further options of headrace serve, in one word")
    options = parser.parse_args()
    load_before, rows = load_average(), []
    vocab_size = json.loads((options.model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    with tempfile.TemporaryDirectory() as parent:
        for case in options.cases:
            folder = options.model if case == DENSE else folder_of(options.model, MODES[case], Path(parent))
            for beside in [None, *([options.beside] if options.beside else [])]:
                limit = [] if beside is None else ["--max-prefill-tokens-beside-decode", str(beside)]
                server = start_server(Path(parent) / "log.txt", str(folder), *OPTIONS, *limit, *options.serve)
                try:
                    server.wait_healthy()
                    row = asyncio.run(measure(server.url, options.clients, options.length, vocab_size))
                finally:
                    stop_server(server)
                rows.append({"case": case, "beside": beside, **row})
                print(json.dumps(rows[-1]), flush=True)
                if options.output:
                    report = {"rows": rows, "length": options.length, "clients": options.clients, **facts(load_before)}
                    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
