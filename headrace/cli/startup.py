"""An engine client that prints its start-up, and the report: seconds of each phase, use of memory, attention backend of each
layer, decisions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.status import Status
from rich.table import Table
from rich.text import Text

from headrace.bench.report import add_row, plain_width, table
from headrace.config import EngineArgs
from headrace.core.weights import OF_FILES, ServedWeights
from headrace.engine.info import EngineInfo, LayerLine, Progress
from headrace.errors import human_size, ranges
from headrace.frontend.async_llm import AsyncLLM
from headrace.processes.spawn import Spawned


def print_report(console: Console, info: EngineInfo, *, environment: bool = False) -> None:
    plain_width(console)
    console.print(render(info, environment=environment))


QUESTIONED = (
    *("model", "model_impl", "dtype", "quantization", "generation_config", "max_model_len", "attention_backend"),
    *("sparse_prefill", "tool calls", "reasoning"),
)
"""Decisions that the summary shows."""


def print_summary(console: Console, info: EngineInfo, address: str) -> None:
    """One screen: what is served, how fast it started, the decisions that a user may question, and how to reach it."""
    plain_width(console)
    slowest = sorted((phase for phase in info.timeline if phase.seconds >= 0.1), key=lambda phase: -phase.seconds)
    phases = ", ".join(f"{phase.name} {phase.seconds:.1f}" for phase in slowest)
    largest = sorted((line for line in info.memory if line.nbytes > 2**20), key=lambda line: -line.nbytes)
    rows = [(line.name, line.value, line.reason) for line in info.decisions if line.name in QUESTIONED]
    console.print(
        headline(info),
        f"{human_size(sum(line.nbytes for line in info.memory))} of memory: "
        + ", ".join(f"{line.name} {human_size(line.nbytes)}" for line in largest),
        f"started in {sum(phase.seconds for phase in info.timeline):.1f} s: {phases}",
        decisions(rows),
        Text("--report and headrace doctor say the rest of what was decided, and why\n", "dim"),
        Text.assemble((address, "bold"), "   try: ", (example(address), "bold")),
        sep="\n",
        highlight=False,
    )


def print_models(console: Console, models: Sequence[tuple[str, str, str, str]], memory: int, address: str) -> None:
    """One screen: the models that are served, with (name, model, memory, context) of each, and how to reach them."""
    plain_width(console)
    console.print(
        table("Models", ("name", "model", "memory", "context"), models, "llrr"),
        f"loaded when a request names them, within {human_size(memory)} at once\n",
        Text.assemble((address, "bold"), "   try: ", (example(address), "bold")),
        sep="\n",
        highlight=False,
    )


def example(address: str) -> str:
    """A command that talks to the server."""
    if "://" in address:
        return f"headrace chat --url {address}"
    return f"curl --unix-socket {address} http://localhost/v1/models"


def render(info: EngineInfo, *, environment: bool = False) -> RenderableType:
    """The whole report; empty parts are left out."""
    parts: list[RenderableType] = [headline(info)]
    if environment and info.environment:
        parts.append(table("Environment", ("fact", ""), info.environment.items(), "ll"))
    if info.timeline:
        parts.append(timeline(info))
    if info.memory:
        parts.append(memory(info))
    if info.layers:
        parts.append(layers(info))
    if info.decisions:
        parts.append(decisions([(line.name, line.value, line.reason) for line in info.decisions]))
    return Group(*(item for part in parts for item in (part, Text())))


def as_json(info: EngineInfo) -> str:
    return json.dumps(_named(info), indent=2, ensure_ascii=False)


def _named(info: EngineInfo) -> dict[str, Any]:
    """The structs of EngineInfo travel as arrays; here each value has its name."""

    def named(value: Any) -> Any:
        if isinstance(value, list):
            return [named(entry) for entry in value]
        return msgspec.structs.asdict(value) if isinstance(value, msgspec.Struct) else value

    return {name: named(getattr(info, name)) for name in info.__struct_fields__}


def headline(info: EngineInfo) -> Text:
    weights = info.dtype if info.quantization == "none" else f"{info.dtype}, weights {info.quantization}"
    return Text.assemble(
        (info.model, "bold"),
        f"  {info.architecture} on {info.device}, {weights}; context {info.max_model_len:,} tokens, "
        f"{info.max_num_seqs:,} sequences at once, {info.max_num_batched_tokens:,} tokens a step",
    )


def timeline(info: EngineInfo) -> Table:
    rows = [(phase.name, f"{phase.seconds:.2f}", phase.detail) for phase in info.timeline]
    result = table("Start-up", ("phase", "seconds", ""), rows, "lrl")
    return _with_total(result, "total", f"{sum(phase.seconds for phase in info.timeline):.2f}", "")


def memory(info: EngineInfo) -> Table:
    rows = [(line.name, f"{line.nbytes:,}", human_size(line.nbytes), line.detail) for line in info.memory]
    total = sum(line.nbytes for line in info.memory)
    result = table("Memory", ("what", "bytes", "", ""), rows, "lrrl")
    return _with_total(result, "total", f"{total:,}", human_size(total), "")


def layers(info: EngineInfo) -> Table:
    """Layers of one geometry and backend share a line, wherever in the model they are."""
    groups: dict[tuple[Any, ...], list[LayerLine]] = {}
    for line in info.layers:
        kind = tuple(getattr(line, name) for name in line.__struct_fields__ if name != "layer")
        groups.setdefault(kind, []).append(line)
    rows = [
        (
            ranges([line.layer for line in members]),
            f"{first.num_heads} / {first.num_kv_heads} KV",
            _width(first),
            _sees(first),
            f"{first.kv_bytes_per_token:,} B",
            first.backend,
            first.reason,
        )
        for members in groups.values()
        for first in members[:1]
    ]
    header = ("layers", "heads", "width", "sees", "KV a token", "backend", "because")
    total = sum(line.kv_bytes_per_token for line in info.layers)
    return _with_total(table("Attention", header, rows, "llllrll"), "all", "", "", "", f"{total:,} B", "", "")


def _with_total(table: Table, *cells: str) -> Table:
    table.add_section()
    add_row(table, *cells)
    return table


def _width(line: LayerLine) -> str:
    if line.mla:
        return f"latent {line.v_head_dim}, {line.rotary_dim} rotated"
    width = str(line.head_dim) if line.head_dim == line.v_head_dim else f"K {line.head_dim} / V {line.v_head_dim}"
    return width if line.rotary_dim in (0, line.head_dim) else f"{width}, {line.rotary_dim} rotated"


def _sees(line: LayerLine) -> str:
    words = ["all" if line.window is None else f"{line.window:,} tokens"]
    if line.chunked:
        words = [f"chunks of {line.window:,}"]
    if line.indexer:
        words = [line.indexer]
    if line.sinks:
        words.append("sinks")
    if line.soft_cap is not None:
        words.append(f"soft cap {line.soft_cap:g}")
    if line.kv_source is not None:
        words.append(f"KV of layer {line.kv_source}")
    return ", ".join(words)


def decisions(rows: Sequence[tuple[str, str, str]]) -> Table:
    return table("Decisions", ("setting", "value", "because"), rows, "lll")


class AnnouncedLLM(AsyncLLM):
    """Prints to ``console``: the progress, only where that is a terminal, and at its end what ``report`` prints."""

    def __init__(
        self,
        args: EngineArgs,
        console: Console,
        report: Callable[[Console, EngineInfo], None] | None = None,
        *,
        chat_template: str | None = None,
        spawned: Spawned | None = None,
        served: ServedWeights = OF_FILES,
    ) -> None:
        self._console = console
        self._report = report
        self._status: Status | None = None
        super().__init__(args, on_progress=self._show, chat_template=chat_template, spawned=spawned, served=served)

    async def start(self) -> None:
        with self._console.status("starting the engine") as self._status:
            try:
                await super().start()
            finally:
                self._status = None

    def serving(self) -> None:
        super().serving()
        if self._report is not None:
            self._report(self._console, self.info)

    def _show(self, progress: Progress) -> None:
        if self._status is not None:
            self._status.update(Text(describe(progress)))


def describe(progress: Progress) -> str:
    """One line: "weights 42 % model.layers.3..." """
    share = "" if progress.fraction is None else f" {progress.fraction:.0%}"
    return f"{progress.phase}{share} {progress.detail}".rstrip()
