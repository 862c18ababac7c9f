"""Times a workload of pictures with the vision encoder in a stream of its own, and in the model's, in turns:

    python benchmarks/encoder_overlap.py MODEL --max-len 4096 --repetitions 3 --output overlap.json

One engine with random weights serves all repetitions; each has pictures of its own. On a GPU, the encoder of a step in its own
stream runs beside the step before. On a CPU there are no streams, and both ways are the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from headrace.bench.pictures import Pictures
from headrace.bench.report import facts, load_average
from headrace.bench.workloads import Workload, build, placeholder
from headrace.config import EngineArgs
from headrace.frontend.llm import LLM
from headrace.kernels.transfer import SideStream
from headrace.runner.parts.media import MediaTables
from headrace.sampling_params import SamplingParams
from headrace.sources.files import find_model

WAYS = ("own stream", "model's stream")


def generate(llm: LLM, load: Workload) -> float:
    """Seconds from the submission of all prompts to the last token."""
    lengths = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n, detokenize=False) for n in load.output_lens]
    start = time.perf_counter()
    results = llm.generate(load.requests(), lengths)
    seconds = time.perf_counter() - start
    assert [len(result.outputs[0].token_ids) for result in results] == load.output_lens
    return seconds


def measure(args: EngineArgs, load: Workload, repetitions: int) -> dict[str, Any]:
    """Seconds of each way's repetitions, which alternate."""
    before = load_average()
    llm = LLM(**vars(args))
    core: Any = llm._engine
    (media,) = (part for part in core.executor.runner.parts if isinstance(part, MediaTables))
    streams = dict(zip(WAYS, (media._side, SideStream(torch.device("cpu"))), strict=True))
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    number = 0
    try:
        # The first repetition of each way is the warm-up.
        for _ in range(repetitions + 1):
            for way, stream in streams.items():
                media._side = stream
                seconds[way].append(generate(llm, load.repetition(number)))
                number += 1
    finally:
        llm.close()
    best = {way: min(each[1:]) for way, each in seconds.items()}
    return (
        {
            "workload": load.name,
            "warm_up": {way: each[0] for way, each in seconds.items()},
            "seconds": {way: each[1:] for way, each in seconds.items()},
            "best": best,
            "median": {way: statistics.median(each[1:]) for way, each in seconds.items()},
            "requests_per_second": {way: len(load.prompts) / each for way, each in best.items()},
            "speedup": best[WAYS[1]] / best[WAYS[0]],
        }
        | facts(before)
        | {"command": " ".join(["python", *sys.argv])}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model's directory; a config and a processor are enough")
    parser.add_argument("--max-len", type=int, default=4096)
    parser.add_argument("--repetitions", type=int, default=3, help="measured ones of each way")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--image-size", type=int, nargs=2, default=(1024, 1024), metavar=("WIDTH", "HEIGHT"))
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="an engine argument; the value is JSON"
    )
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    fields = {name: json.loads(value) for name, _, value in (each.partition("=") for each in given.set)}
    args = EngineArgs(
        model=given.model,
        load_format="dummy",
        max_model_len=given.max_len,
        enable_prefix_caching=False,
        **fields,
    )
    config = find_model(args).config
    whole = build("images64_text", None)
    few = dataclasses.replace(whole, prompts=whole.prompts[: given.requests], output_lens=whole.output_lens[: given.requests])
    load = few.marked(placeholder(vars(config)))
    report = measure(args, dataclasses.replace(load, name="images", pictures=Pictures(*given.image_size)), given.repetitions)
    text = json.dumps(report, indent=1, default=str)
    if given.output is not None:
        given.output.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
