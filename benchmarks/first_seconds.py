"""Output tokens a second of a server that is loaded from the first second after /health:

    python benchmarks/first_seconds.py MODEL [--seconds 45] [--output FILE] [-- OPTIONS of headrace serve]

Eight `headrace bench serve` processes of 8 clients each ask for answers of different lengths, so that requests end and begin in
every step and the engine is never idle. The rate is taken from the server's own counter each second, beside the number of
captured CUDA graphs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

LENGTHS = (150, 173, 199, 223, 256, 281, 307, 331)
"""Output tokens of a request, by client process."""


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def metric(text: str, name: str) -> float:
    return sum(float(line.split()[-1]) for line in text.splitlines() if re.match(rf"{name}[ {{]", line))


def start(*arguments: str, output: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "headrace.cli", *arguments]
    return subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)


def measure(url: str, seconds: float, folder: Path) -> dict[str, Any]:
    """Loads the server, and returns what a second of it gave, and the gaps that clients saw."""
    reports = [folder / f"{length}.json" for length in LENGTHS]
    clients = []
    for length, report in zip(LENGTHS, reports, strict=True):
        options = f"--ignore-eos --concurrency 8 --num-requests 1000000 --duration {seconds} --max-tokens {length}".split()
        clients.append(start("bench", "serve", "--url", url, *options, "-o", str(report), output=subprocess.DEVNULL))
    try:
        points = []
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            text = read(f"{url}/metrics")
            tokens = metric(text, "headrace_generation_tokens_total")
            points.append((time.monotonic(), tokens, int(metric(text, "headrace_cuda_graphs_captured"))))
            time.sleep(1)
        for client in clients:
            client.wait(2 * seconds + 30)
    finally:
        for client in clients:
            stop(client)
    points = [point for point in points if point[1] > points[0][1]]

    def rate(first: int, last: int) -> int:
        (since, before, _), (until, after, _) = points[first], points[last]
        return round((after - before) / (until - since))

    gaps = [json.loads(report.read_text())["milliseconds"]["between events"] for report in reports]
    return {
        "first_10_s": rate(0, 10),
        "last_10_s": rate(-11, -1),
        "by_second": [rate(place, place + 1) for place in range(len(points) - 1)],
        "graphs": [point[2] for point in points],
        "gap_ms": {name: max(gap[name] for gap in gaps) for name in ("p50", "p99", "max")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="default: the embedded model")
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--output", type=Path)
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given, options = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as output:
            server = start("serve", *([given.model] if given.model else []), "--port", str(port), *options, output=output)
        try:
            while True:
                with contextlib.suppress(OSError):
                    read(f"{url}/health")
                    break
                if server.poll() is not None:
                    sys.exit(log.read_text())
                time.sleep(0.02)
            report = measure(url, given.seconds, Path(folder))
        finally:
            stop(server)
    report["options"], report["load"] = options, os.getloadavg()
    print(json.dumps(report))
    if given.output:
        given.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
