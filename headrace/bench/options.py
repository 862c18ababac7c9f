"""Options of the ``headrace bench`` commands: what is measured, how, and where the report goes. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from headrace.bench.constrained import Constrained
from headrace.errors import ConfigError
from headrace.host.user_files import check_output
from headrace.options import HOW, REPORT, WHAT, Checked, OptionSpec

ImageForm = Literal["png", "jpeg", "features", "upload"]
LENGTH = 128
"""Default length of a prompt and of an output, in tokens."""
CLIENTS = 8
IN_FLIGHT = 1024
_TOKENS = OptionSpec(min=1, default=str(LENGTH))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportOptions(Checked):
    panels = MappingProxyType({"as_json": REPORT})

    as_json: Annotated[bool, OptionSpec(flags=("--json",))] = False
    """Print the report as JSON, not as tables."""
    output: Annotated[Path | None, OptionSpec(flags=("--output", "-o"), metavar="FILE")] = None
    """Also write the report as JSON to this file."""

    def validate(self) -> None:
        super().validate()
        check_output(self.output, "--output")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatencyOptions(Checked):
    panels = MappingProxyType({"workload": WHAT, "repetitions": HOW})

    workload: Annotated[str | None, OptionSpec(metavar="NAME")] = None
    """A workload by name: chat, chat_shared (text); single, batch8, batch64, mixed256, prefill8k, prefill16k, prefill32k,
    prefill64k, prefill128k, longctx_decode (random tokens); isl1000-osl1000 and nine other lengths (random tokens, for
    minutes); images64, images64_features, images64_text (a picture of 1024 x 1024 random pixels in each prompt, random
    features in its place, and neither; for throughput)."""
    input_len: Annotated[int | None, _TOKENS] = None
    """Tokens of each prompt, without --workload."""
    output_len: Annotated[int | None, _TOKENS] = None
    """Tokens to generate for each, without --workload."""
    repetitions: Annotated[int, OptionSpec(min=1)] = 5
    """Measured repetitions of each prompt."""
    warm_up: Annotated[int, OptionSpec(min=0)] = 2
    """Requests before the measured ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThroughputOptions(Checked):
    panels = MappingProxyType({"workload": WHAT, "reference_dtype": HOW})

    workload: Annotated[tuple[str, ...], OptionSpec(metavar="NAME")] = ()
    """Workloads by name, as for latency. Repeatable, or separated by commas; all: every one of random tokens."""
    copies: Annotated[int | None, OptionSpec(min=1, max=64, default="1")] = None
    """Send the requests of each --workload this many times, all at once: as much to do for each of several replicas."""
    batch: Annotated[tuple[int, ...], OptionSpec(min=1, default="1, 8, 32")] = ()
    """Prompts at once, without --workload. Repeatable."""
    input_len: Annotated[int | None, _TOKENS] = None
    """Tokens of each prompt, without --workload."""
    output_len: Annotated[int | None, _TOKENS] = None
    """Tokens to generate for each, without --workload."""
    compare: Annotated[tuple[str, ...], OptionSpec(metavar="ENGINE")] = ()
    """Also run the workloads through transformers or llama.cpp. Repeatable."""
    reference_dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, OptionSpec(default="bfloat16")] = None
    """Dtype of transformers, with --compare transformers; a quantised file is dequantised."""
    temperature: Annotated[float | None, OptionSpec(min=0.0, default="0: greedy")] = None
    """Sampling temperature, without --compare."""
    constrain: Constrained | None = None
    """Hold every output to lines of JSON of one of four schemas, without --compare. Needs a tokenizer."""
    repetitions: Annotated[int | None, OptionSpec(min=1, default="3; of large workloads 2")] = None
    """Repetitions of each workload; the best one counts."""
    timeout: Annotated[float | None, OptionSpec(min=1, default="1800")] = None
    """Seconds that each process of a comparison may take."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadOptions(Checked):
    """Load to send to a server. Both the count and the time are bounded.

    Raises:
        ConfigError: a value is out of range, or contradicts another; names it.
    """

    panels = MappingProxyType({"url": WHAT, "seed": HOW, "image_size": WHAT})

    url: str = "http://127.0.0.1:8000"
    """The server."""
    model: Annotated[str | None, OptionSpec(default="the server's first")] = None
    """The model to ask for."""
    api_key: Annotated[str | None, OptionSpec(secret=True, default="HEADRACE_API_KEY of the environment")] = dataclasses.field(
        default_factory=lambda: os.environ.get("HEADRACE_API_KEY"), metadata={"environment": "HEADRACE_API_KEY"}
    )
    """Key for the server."""
    concurrency: Annotated[int | None, OptionSpec(min=1, max=4096, default=f"{CLIENTS}, without --rate")] = None
    """Closed loop: number of clients, each of which sends its next request when the last is answered."""
    rate: Annotated[float | None, OptionSpec(above=0.0)] = None
    """Open loop: requests arrive at this mean rate a second, at random, whether the server keeps up or not."""
    num_requests: Annotated[int, OptionSpec(min=1, max=1_000_000)] = 64
    """Requests at most."""
    duration: Annotated[float, OptionSpec(above=0.0, max=86_400)] = 120.0
    """Seconds at most in which requests are sent; those in flight get as long again, then count as failed."""
    max_tokens: Annotated[int, OptionSpec(min=1)] = 64
    """Tokens to generate for each request."""
    ignore_eos: Annotated[bool, OptionSpec(flags=("--ignore-eos",))] = False
    """Generate all of --max-tokens every time. headrace and vLLM know this field; other servers may refuse it."""
    seed: Annotated[int | None, OptionSpec(default="0")] = None
    """Open loop: seeds the arrivals."""
    max_in_flight: Annotated[int | None, OptionSpec(min=1, max=16_384, default=str(IN_FLIGHT))] = None
    """Open loop: requests in flight at most. What would be beyond counts as dropped."""
    processes: Annotated[int, OptionSpec(min=1, max=256)] = 1
    """Client processes that share the load. One is enough while the report's "busiest" stays well below 100 %."""
    image_size: Annotated[str | None, OptionSpec(metavar="WIDTHxHEIGHT")] = None
    """Send a picture of this size with each request, of random pixels: no two are alike."""
    image_form: Annotated[ImageForm | None, OptionSpec(default="png")] = None
    """Form in which pictures are sent: data URLs of PNG or JPEG; or random features in their place, as safetensors in the
    request, or uploaded before the first request, which then refers to them."""
    image_model: Annotated[str | None, OptionSpec(metavar="MODEL")] = None
    """The served model's directory or name, whose config and processor say what features of a picture look like."""

    def validate(self) -> None:
        super().validate()
        if self.concurrency is not None and self.rate is not None:
            raise ConfigError("give --concurrency or --rate, one of the two", "--rate")
        for option, value in (("--seed", self.seed), ("--max-in-flight", self.max_in_flight)):
            if self.rate is None and value is not None:
                raise ConfigError("it applies to the open loop, and needs --rate", option)
        if self.processes > min(self.num_requests, self.clients or self.num_requests):
            raise ConfigError("each process needs a client and a request of its own", "--processes")
        for option, given in (("--image-form", self.image_form), ("--image-model", self.image_model)):
            if self.image_size is None and given is not None:
                raise ConfigError("it applies to pictures, and needs --image-size", option)
        if self.sends_features != (self.image_model is not None):
            raise ConfigError("--image-form features and upload need it, and no other form does", "--image-model")

    def shares(self) -> list[LoadOptions]:
        """The load of each process: equal parts of the clients or of the rate, and of the requests."""
        count = self.processes

        def part(whole: int, index: int) -> int:
            return whole // count + (index < whole % count)

        shares = []
        for index in range(count):
            mine = dataclasses.replace(self, processes=1, num_requests=part(self.num_requests, index))
            if self.rate is None:
                mine = dataclasses.replace(mine, concurrency=part(self.clients or CLIENTS, index))
            else:
                in_flight = max(1, part(self.max_in_flight or IN_FLIGHT, index))
                seed = (self.seed or 0) + index
                mine = dataclasses.replace(mine, rate=self.rate / count, seed=seed, max_in_flight=in_flight)
            shares.append(mine)
        return shares

    @property
    def clients(self) -> int | None:
        """Number of clients of the closed loop; None: the loop is open."""
        return None if self.rate is not None else self.concurrency or CLIENTS

    @property
    def sends_features(self) -> bool:
        return self.image_form in ("features", "upload")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateOptions(Checked):
    panels = MappingProxyType({"seconds": HOW})

    seconds: Annotated[float, OptionSpec(min=1.0, max=86_400)] = 60.0
    """Seconds of random traffic; it lasts longer where fewer steps than a fit needs were measured."""
    traffic_seed: Annotated[int, OptionSpec(min=0)] = 0
    """Seed of the traffic."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongContextOptions(Checked):
    panels = MappingProxyType({"tasks": WHAT, "task_seed": HOW, "router_dump": REPORT})

    tasks: Annotated[str, OptionSpec(metavar="NAMES")] = "needle,multikey,variables,words"
    """Tasks, separated by commas: needle, multikey, variables, words."""
    lengths: Annotated[str, OptionSpec(metavar="NUMBERS")] = "2048,4096"
    """Tokens of a prompt, separated by commas."""
    data: Annotated[Path | None, OptionSpec(metavar="FILE")] = None
    """Also the lines of a JSONL file with context, input and answers, as LongBench has them, cut to the largest of
    --lengths."""
    samples: Annotated[int, OptionSpec(min=1)] = 4
    """Prompts of each task and length, and lines of --data."""
    modes: Annotated[str, OptionSpec(metavar="MODES")] = "dense,xattn,mean"
    """Attention of prompts, separated by commas: dense, xattn, mean, elastic (by the model's router). :NUMBER sets a threshold,
    as in xattn:0.8."""
    task_seed: Annotated[int, OptionSpec(min=0)] = 0
    """Seed of the tasks."""
    router_dump: Annotated[Path | None, OptionSpec(metavar="FILE")] = None
    """Write a line of JSON for each prompt and mode: its answer, the density of each layer, the types of heads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentOptions(Checked):
    """Raises: ConfigError: a value is out of range, or contradicts another; names it."""

    panels = MappingProxyType({"conversations": WHAT, "traffic_seed": HOW})

    conversations: Annotated[int, OptionSpec(min=1, max=4096)] = 8
    """Conversations that begin together."""
    turns: Annotated[int, OptionSpec(min=1, max=10_000)] = 43
    """Turns of each; a subagent has a quarter as many."""
    system_len: Annotated[int, OptionSpec(min=1)] = 6000
    """Tokens of the instructions and tools that all share."""
    tool_min: Annotated[int, OptionSpec(min=1)] = 300
    """Fewest tokens that a turn adds before the answer."""
    tool_max: Annotated[int, OptionSpec(min=1)] = 8000
    """Most tokens that a turn adds before the answer."""
    answer_len: Annotated[int, OptionSpec(min=1)] = 444
    """Tokens of each answer."""
    subagents: Annotated[float, OptionSpec(min=0.0, max=1.0)] = 0.44
    """Share of the conversations that start a subagent, which begins with the instructions, or with the first turn too."""
    scale: Annotated[float, OptionSpec(above=0.0, max=100.0)] = 1.0
    """All numbers of tokens are multiplied by it."""
    traffic_seed: Annotated[int, OptionSpec(min=0)] = 0
    """Seed of the conversations."""

    def validate(self) -> None:
        super().validate()
        if self.tool_min > self.tool_max:
            raise ConfigError(f"{self.tool_min} is more than --tool-max {self.tool_max}", "--tool-min")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongBenchOptions(Checked):
    panels = MappingProxyType({"directory": WHAT, "length": HOW})

    directory: Annotated[Path | None, OptionSpec(metavar="DIRECTORY")] = None
    """LongBench's files: data/TASK.jsonl, config/dataset2prompt.json and config/dataset2maxlen.json, as its authors publish
    them."""
    tasks: Annotated[str, OptionSpec(metavar="NAMES", default="all that have a file")] = ""
    """Tasks, separated by commas, such as narrativeqa,hotpotqa_e."""
    samples: Annotated[int | None, OptionSpec(min=1, default="all")] = None
    """Records of each task, the first ones of its file."""
    modes: Annotated[str, OptionSpec(metavar="MODES")] = "dense"
    """Attention of prompts, separated by commas: dense, xattn, mean, elastic (by the model's router). :NUMBER sets a threshold,
    as in xattn:0.8."""
    length: Annotated[int | None, OptionSpec(min=16, default="what the context has room for")] = None
    """Most tokens of a prompt; the middle of a longer one is left out."""

    def validate(self) -> None:
        super().validate()
        if self.directory is None:
            raise ConfigError("name the directory with LongBench's files", "--directory")
