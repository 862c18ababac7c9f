"""``headrace explain``: how one prompt attends, head by head."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import ENGINE_OPTIONS, command
from headrace.config import EngineArgs
from headrace.errors import ConfigError


@command(args=ENGINE_OPTIONS.without("enable_prefix_caching"))
def explain(
    args: EngineArgs,
    prompt: Annotated[str | None, typer.Option("--prompt", help="The prompt, as text.", show_default=False)] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option("--prompt-file", help="Text file with the prompt.", metavar="FILE", show_default=False),
    ] = None,
    layer: Annotated[int, typer.Option("--layer", help="Layer of the head whose blocks are shown.", min=0)] = 0,
    head: Annotated[int, typer.Option("--head", help="Query head whose blocks are shown.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page with pictures and numbers.", metavar="FILE", show_default=False)
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(
            "--png",
            help="Write a picture: the density of each layer's heads, and the blocks of keys that one head attends to.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Compute one prompt and say how it attends: the density of each layer and head, and what a model's router decided.

    For models with elastic attention, and for others with --sparse-prefill.
    """
    if (prompt is None) == (prompt_file is None):
        raise ConfigError("give the prompt by --prompt or by --prompt-file", "--prompt")
    text = prompt if prompt is not None else _read(prompt_file)
    import dataclasses

    import msgspec

    from headrace.cli.heatmap import page
    from headrace.cli.heatmap import png as picture
    from headrace.engine.explain import explain as look
    from headrace.engine.llm import LLM

    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    with LLM(**values | {"enable_prefix_caching": False}) as llm:
        found = look(llm, text, layer=layer, head=head)
    if png is not None:
        png.write_bytes(picture(found))
    if html is not None:
        html.write_text(page(found), encoding="utf-8")
    if as_json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
        return
    report = found.report
    density = "none" if report.density is None else f"{report.density:.3f}"
    how = "" if report.exact else ", routed in segments"
    print(f"{found.prompt_tokens} tokens, {report.mode}, threshold {report.threshold}: density {density}{how}")
    for number, (mean, heads) in enumerate(zip(report.layers, found.heads, strict=True)):
        kinds = " | ".join(" ".join(segment[number]) for segment in report.head_types)
        numbers = "dense" if mean is None else f"{mean:.3f}: " + " ".join(f"{one:.2f}" for one in heads if one is not None)
        print(f"layer {number:3} {numbers}{f'  ({kinds})' if kinds else ''}")


def _read(path: Path | None) -> str:
    try:
        return "" if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the prompt cannot be read from {path}: {error}", "--prompt-file") from error
