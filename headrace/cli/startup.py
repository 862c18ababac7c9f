"""What a start-up prints: how long each phase took, where the memory goes, which backend each layer got, what was decided."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from headrace.cli.units import human_size, ranges
from headrace.engine.info import EngineInfo, LayerLine

PLAIN_WIDTH = 160
"""Width of the report where no terminal gives one."""


def print_report(console: Console, info: EngineInfo, *, environment: bool = False) -> None:
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    console.print(render(info, environment=environment))


def render(info: EngineInfo, *, environment: bool = False) -> RenderableType:
    """The whole report; empty parts are left out."""
    parts: list[RenderableType] = [headline(info)]
    if environment and info.environment:
        parts.append(_pairs("Environment", list(info.environment.items())))
    if info.timeline:
        parts.append(timeline(info))
    if info.memory:
        parts.append(memory(info))
    if info.layers:
        parts.append(layers(info))
    if info.decisions:
        parts.append(decisions(info))
    return Group(*(item for part in parts for item in (part, Text())))


def as_json(info: EngineInfo) -> str:
    return json.dumps(_named(info), indent=2, ensure_ascii=False)


def _named(info: EngineInfo) -> dict[str, Any]:
    """The structs of EngineInfo travel as arrays; here each value has its name."""
    fields = {name: getattr(info, name) for name in info.__struct_fields__}
    return {
        name: [msgspec.structs.asdict(entry) for entry in value]
        if isinstance(value, list) and value and isinstance(value[0], msgspec.Struct)
        else value
        for name, value in fields.items()
    }


def headline(info: EngineInfo) -> Text:
    weights = info.dtype if info.quantization == "none" else f"{info.dtype}, weights {info.quantization}"
    return Text.assemble(
        (info.model, "bold"),
        f"  {info.architecture} on {info.device}, {weights}; context {info.max_model_len:,} tokens, "
        f"{info.max_num_seqs:,} sequences at once, {info.max_num_batched_tokens:,} tokens a step",
    )


def timeline(info: EngineInfo) -> Table:
    table = _table("Start-up", ("phase", "left"), ("seconds", "right"), ("", "left"))
    for phase in info.timeline:
        _add(table, phase.name, f"{phase.seconds:.2f}", phase.detail)
    table.add_section()
    _add(table, "total", f"{sum(phase.seconds for phase in info.timeline):.2f}", "")
    return table


def memory(info: EngineInfo) -> Table:
    table = _table("Memory", ("what", "left"), ("bytes", "right"), ("", "right"), ("", "left"))
    for line in info.memory:
        _add(table, line.name, f"{line.nbytes:,}", human_size(line.nbytes), line.detail)
    total = sum(line.nbytes for line in info.memory)
    table.add_section()
    _add(table, "total", f"{total:,}", human_size(total), "")
    return table


def layers(info: EngineInfo) -> Table:
    """Layers of one geometry and backend share a line, wherever in the model they stand."""
    table = _table(
        "Attention",
        ("layers", "left"),
        ("heads", "left"),
        ("width", "left"),
        ("sees", "left"),
        ("KV a token", "right"),
        ("backend", "left"),
        ("because", "left"),
    )
    groups: dict[tuple[Any, ...], list[LayerLine]] = {}
    for line in info.layers:
        groups.setdefault(_kind(line), []).append(line)
    for members in groups.values():
        first = members[0]
        _add(
            table,
            ranges([line.layer for line in members]),
            f"{first.num_heads} / {first.num_kv_heads} KV",
            _width(first),
            _sees(first),
            f"{first.kv_bytes_per_token:,} B",
            first.backend,
            first.reason,
        )
    total = sum(line.kv_bytes_per_token for line in info.layers)
    table.add_section()
    _add(table, "all", "", "", "", f"{total:,} B", "", "")
    return table


def _width(line: LayerLine) -> str:
    if line.latent:
        return f"latent {line.v_head_dim}, {line.rotary_dim} rotated"
    width = str(line.head_dim) if line.head_dim == line.v_head_dim else f"K {line.head_dim} / V {line.v_head_dim}"
    return width if line.rotary_dim in (0, line.head_dim) else f"{width}, {line.rotary_dim} rotated"


def _sees(line: LayerLine) -> str:
    words = ["all" if line.window is None else f"{line.window:,} tokens"]
    if line.sinks:
        words.append("sinks")
    if line.soft_cap is not None:
        words.append(f"soft cap {line.soft_cap:g}")
    if line.kv_source is not None:
        words.append(f"KV of layer {line.kv_source}")
    return ", ".join(words)


def decisions(info: EngineInfo) -> Table:
    table = _table("Decisions", ("setting", "left"), ("value", "left"), ("because", "left"))
    for line in info.decisions:
        _add(table, line.name, line.value, line.reason)
    return table


def _kind(line: LayerLine) -> tuple[Any, ...]:
    return tuple(getattr(line, name) for name in line.__struct_fields__ if name != "layer")


def _pairs(title: str, pairs: list[tuple[str, str]]) -> Table:
    table = _table(title, ("fact", "left"), ("", "left"))
    for name, value in pairs:
        _add(table, name, value)
    return table


def _table(title: str, *columns: tuple[str, str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name, side in columns:
        table.add_column(Text(name), justify="right" if side == "right" else "left", overflow="fold")
    return table


def _add(table: Table, *cells: str) -> None:
    """Names and reasons are data: a square bracket in them is no markup."""
    table.add_row(*map(Text, cells))
