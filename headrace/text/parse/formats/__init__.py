"""The formats that are known, by name. Of two that fit a chat template, the first is taken."""

from __future__ import annotations

from headrace.text.parse.format import Format, Reasoning
from headrace.text.parse.formats import (
    deepseek,
    gemma,
    glm,
    hermes,
    json_array,
    kimi,
    llama,
    minimax,
    mistral,
    openai,
    pythonic,
    qwen3_coder,
)

_FAMILIES = (
    openai, gemma, minimax, kimi, deepseek, mistral, glm, qwen3_coder, hermes, pythonic, llama, json_array,
)  # fmt: skip
TOOL_FORMATS: tuple[Format, ...] = tuple(format for family in _FAMILIES for format in family.FORMATS)
# V3.2 is written with V3's markers in its history, and V3 fits V3.1's hints.
TOOL_FORMATS = tuple(sorted(TOOL_FORMATS, key=lambda format: format.name != "deepseek_v32"))

REASONING_FORMATS: tuple[Reasoning, ...] = (
    Reasoning("gemma4", "<|channel>thought\n", "<channel|>", hints=("<|channel>",)),
    Reasoning("mistral", "[THINK]", "[/THINK]"),
    Reasoning("seed_oss", "<seed:think>", "</seed:think>"),
    Reasoning(
        "deepseek_r1",
        "<think>",
        "</think>",
        aliases=(
            "qwen3", "deepseek_v3", "deepseek_v31", "deepseek_v4", "glm45", "glm47", "kimi_k2", "minimax_m2", "ernie45",
            "hunyuan_a13b", "nemotron", "mimo", "step3", "think",
        ),
    ),
)  # fmt: skip


def tool_format(name: str) -> Format | None:
    return next((format for format in TOOL_FORMATS if name in (format.name, *format.aliases)), None)


def reasoning_format(name: str) -> Reasoning | None:
    return next((format for format in REASONING_FORMATS if name in (format.name, *format.aliases)), None)


def tool_names() -> list[str]:
    return sorted(name for format in TOOL_FORMATS for name in (format.name, *format.aliases))


def reasoning_names() -> list[str]:
    names = {name for format in REASONING_FORMATS for name in (format.name, *format.aliases)}
    return sorted(names | {format.name for format in TOOL_FORMATS if format.whole})
