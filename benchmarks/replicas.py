"""Measures replicas behind one server: routing policies on prompts behind shared prefixes, and the loss of a replica.

    python benchmarks/replicas.py MODEL --output results.json
    python benchmarks/replicas.py tiny --prefix-tokens 256 --rate 4 --seconds 10

Starts `headrace serve MODEL -dp N` with random weights for one policy after the other, and sends each the same requests at the
same random times: token ids, streamed over HTTP. The cache of a replica holds --held of the --prefixes that it would need for
all; its share of them, and the requests' own tokens, fit. All prefixes are sent once before, as a server that runs for long has
seen them.

With the last policy's server it then kills a replica's process (SIGKILL) in the middle of the same load with longer answers,
and counts what became of the requests under way and of later ones, and how long the replica took to come back. A row is printed
and written when it is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import httpx  # noqa: E402
from simulator_accuracy import TINY  # noqa: E402
from support.server.running import start_server  # noqa: E402

from headrace.bench.report import facts, load_average  # noqa: E402
from headrace.metrics.exchanges import distribution  # noqa: E402

BLOCK = 16
OWN_TOKENS = 64
"""Tokens of a prompt behind its prefix."""
POLICIES = ("round-robin", "prefix")
START_SECONDS = 240.0
Json = dict[str, Any]


@dataclasses.dataclass
class Answer:
    """Outcome of one request, in seconds since the load began."""

    sent: float
    first: float | None = None
    ended: float | None = None
    events: int = 0
    last: float = 0.0
    longest_gap: float = 0.0
    """Between two events."""
    error: str = ""


class Server:
    """``headrace serve``, from its start to its end."""

    def __init__(self, model: str, policy: str, folder: Path, options: argparse.Namespace) -> None:
        self._log = folder / f"{policy}.log"
        blocks = options.held * -(-options.prefix_tokens // BLOCK) + 1
        words = ["-dp", str(options.replicas), "--dp-routing-policy", policy, "--load-format", "dummy", "--skip-tokenizer-init"]
        words += ["--num-kv-blocks", str(blocks), "--block-size", str(BLOCK), *options.serve]
        started = start_server(self._log, model, *words)
        self.url, self.process = started.url, started.process

    def wait(self) -> None:
        """Waits until all replicas take requests and have captured their graphs."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            if self._get("/ready") == 200 and self._metric("headrace_cuda_graphs_captured") >= self._metric(
                "headrace_cuda_graphs"
            ):
                return
            time.sleep(0.2)
        raise SystemExit(f"the server is not ready:\n{self._log.read_text(errors='replace')[-4000:]}")

    def ready(self) -> bool:
        return self._get("/ready") == 200

    def pids(self) -> list[int]:
        return [one["pid"] for one in httpx.get(f"{self.url}/server_info", timeout=10).json()["replicas"]]

    def prefix_tokens(self) -> tuple[float, float]:
        """Prompt tokens that were found in a prefix cache, and all that were looked up."""
        return self._metric("headrace_prefix_cache_hit_tokens_total"), self._metric("headrace_prefix_cache_query_tokens_total")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _get(self, path: str) -> int:
        try:
            return httpx.get(self.url + path, timeout=5).status_code
        except httpx.HTTPError:
            return 0

    def _metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        return sum(map(float, re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, flags=re.MULTILINE)))


class Load:
    """Requests at random times; the same ones for every server. Without a tokenizer, an answer has events at its first token
    and at its end, or, with ``each_token``, for every one."""

    def __init__(self, options: argparse.Namespace, vocab_size: int, output_tokens: int, *, each_token: bool = False) -> None:
        rng = random.Random(options.seed)

        def tokens(count: int) -> list[int]:
            return [rng.randrange(vocab_size) for _ in range(count)]

        prefixes = [tokens(options.prefix_tokens) for _ in range(options.prefixes)]
        common = {"max_tokens": output_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        common["return_token_ids"] = each_token
        self.warm_up = [json.dumps(common | {"prompt": prefix + tokens(OWN_TOKENS)}).encode() for prefix in prefixes]
        self.bodies, self.at, now = [], [], 0.0
        while (now := now + rng.expovariate(options.rate)) < options.seconds:
            self.bodies.append(json.dumps(common | {"prompt": rng.choice(prefixes) + tokens(OWN_TOKENS)}).encode())
            self.at.append(now)


async def answer(client: httpx.AsyncClient, body: bytes, sent: float, start: float) -> Answer:
    found = Answer(sent)
    headers = {"Content-Type": "application/json"}
    finished = False
    try:
        async with client.stream("POST", "/v1/completions", content=body, headers=headers) as response:
            if response.status_code != 200:
                found.error = f"{response.status_code}, Retry-After {response.headers.get('Retry-After')}"
                return found
            async for line in response.aiter_lines():
                if not line.startswith("data:") or finished:
                    continue
                if line.endswith("[DONE]"):
                    finished = True
                    continue
                if '"error"' in line:
                    found.error = "an error event after the first token" if found.events else "an error event"
                now = time.perf_counter() - start
                if found.first is None:
                    found.first = now
                else:
                    found.longest_gap = max(found.longest_gap, now - found.last)
                found.events, found.last = found.events + 1, now
        if not finished and not found.error:
            found.error = "cut off"
    except httpx.HTTPError as error:
        found.error = type(error).__name__
    finally:
        found.ended = time.perf_counter() - start
    return found


async def send(url: str, bodies: Sequence[bytes], at: Sequence[float]) -> list[Answer]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120) as client:
        start = time.perf_counter()

        async def one(body: bytes, when: float) -> Answer:
            await asyncio.sleep(max(0.0, start + when - time.perf_counter()))
            return await answer(client, body, time.perf_counter() - start, start)

        return await asyncio.gather(*map(one, bodies, at))


def times(answers: Sequence[Answer]) -> Json:
    good = [each for each in answers if not each.error and each.first is not None and each.ended is not None]
    return {
        "requests": len(answers),
        "succeeded": len(good),
        "errors": Counter(each.error for each in answers if each.error),
        "first token": distribution([each.first - each.sent for each in good if each.first is not None]),
        "longest gap": distribution([each.longest_gap for each in good]),
        "whole request": distribution([each.ended - each.sent for each in good if each.ended is not None]),
    }


def warm_up(server: Server, load: Load) -> None:
    """Each prefix once, slowly enough that no replica is chosen because another is busy."""
    for body in load.warm_up:
        asyncio.run(send(server.url, [body], [0.0]))


def measure(server: Server, load: Load) -> Json:
    before = server.prefix_tokens()
    answers = asyncio.run(send(server.url, load.bodies, load.at))
    time.sleep(1.0)  # Replicas report twice a second.
    found, asked = (now - then for now, then in zip(server.prefix_tokens(), before, strict=True))
    return times(answers) | {"prefix hit rate": round(found / max(1.0, asked), 4)}


def kill(server: Server, load: Load, when: float) -> Json:
    """A load in whose middle a replica is killed."""
    victim = server.pids()[0]

    def is_back() -> bool:
        return server.pids()[0] not in (victim, None) and server.ready()

    async def work() -> tuple[list[Answer], float, float]:
        start = time.perf_counter()
        sending = asyncio.create_task(send(server.url, load.bodies, load.at))
        await asyncio.sleep(when)
        os.kill(victim, signal.SIGKILL)
        killed = time.perf_counter()
        while not await asyncio.to_thread(is_back):
            if time.perf_counter() > killed + START_SECONDS:
                raise SystemExit("the replica does not come back")
            await asyncio.sleep(0.2)
        back = time.perf_counter() - killed
        return await sending, killed - start, back

    answers, killed, back = asyncio.run(work())
    under_way = [each for each in answers if each.sent <= killed and (each.ended is None or each.ended >= killed)]
    later = [each for each in answers if each.sent > killed]
    before = [each for each in answers if each.ended is not None and each.ended < killed]
    return {
        "killed after": round(killed, 3),
        "back after": round(back, 3),
        "before": times(before),
        "under way": times(under_way),
        "later": times(later),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder with a config.json, or tiny")
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--prefixes", type=int, default=24)
    parser.add_argument("--held", type=int, default=16, help="prefixes that fit in the cache of one replica")
    parser.add_argument("--prefix-tokens", type=int, default=8192)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--kill-output-tokens", type=int, default=256, help="of a request while a replica is killed")
    parser.add_argument("--rate", type=float, default=30.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policies", default=",".join(POLICIES), help="separated by commas")
    parser.add_argument("--no-kill", action="store_true", help="kill no replica")
    parser.add_argument(
        "--serve", type=shlex.split, default=[], help="of `headrace serve`, in one word: --serve='--wait-for-kernels'"
    )
    options = parser.parse_args()
    before, start = load_average(), time.monotonic()
    report: Json = {"benchmark": "replicas", "model": options.model, "options": vars(options) | {"output": None}, "rows": {}}

    def done(name: str, row: Json) -> None:
        report["rows"][name] = row
        print(f"{time.monotonic() - start:.0f} s: {name}: {json.dumps(row)}", flush=True)
        if options.output:
            options.output.write_text(json.dumps(report | facts(before), indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory(prefix="replicas-") as name:
        folder, model = Path(name), options.model
        if model == "tiny":
            model = name
            (folder / "config.json").write_text(json.dumps(TINY | {"max_position_embeddings": 16_384}), encoding="utf-8")
        vocab_size = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        load = Load(options, vocab_size, options.output_tokens)
        longer = Load(options, vocab_size, options.kill_output_tokens, each_token=True)
        policies = options.policies.split(",")
        for policy in policies:
            server = Server(model, policy, folder, options)
            try:
                server.wait()
                warm_up(server, load)
                print(f"{time.monotonic() - start:.0f} s: {policy} is warm", flush=True)
                done(policy, measure(server, load))
                if policy == policies[-1] and not options.no_kill:
                    done(f"{policy}, a replica killed", kill(server, longer, options.seconds / 2))
            finally:
                server.stop()
    tails = {policy: report["rows"][policy]["first token"]["p99"] for policy in policies}
    if set(POLICIES) <= set(tails):
        print(f"first token p99, prefix / round-robin: {tails['prefix'] / tails['round-robin']:.3f}")


if __name__ == "__main__":
    main()
