"""Pictures of an Explanation: the density of each head, and the blocks that one head attends to; as PNG and as HTML."""

from __future__ import annotations

import base64
import html
import io
import json
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.frontend.explain import Explanation

_CELL = 12
"""Pixels of a head."""
_MARGIN = 40
_LARGEST = 1024
"""Pixels that the picture of one head's blocks takes at most in each direction."""
_DENSE_LAYER = (208, 208, 208)
_SPARSE, _FULL = (247, 251, 255), (8, 48, 107)
"""Colours of densities 0 and 1."""
_OUTSIDE = (232, 232, 232)


def colour(density: float | None) -> tuple[int, int, int]:
    """Returns a colour from nearly white to dark blue; grey for dense layers."""
    if density is None:
        return _DENSE_LAYER
    share = min(1.0, max(0.0, density)) ** 0.5
    first, second, third = (round(low + (high - low) * share) for low, high in zip(_SPARSE, _FULL, strict=True))
    return first, second, third


def png(found: Explanation) -> bytes:
    """Layers from top to bottom, heads from left to right; beneath, queries from top to bottom, keys from left to right.

    Raises:
        ConfigError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise ConfigError("a picture needs Pillow: pip install pillow", "--png") from None
    columns, rows = max(map(len, found.heads)), len(found.heads)
    count = len(found.blocks)
    scale = max(1, min(8, _LARGEST // max(count, 1)))
    size = min(count * scale, _LARGEST)
    width = _MARGIN + max(columns * _CELL, size, 320) + 10
    image = Image.new("RGB", (width, 2 * _MARGIN + rows * _CELL + size + 10), "white")
    draw = ImageDraw.Draw(image)
    draw.text((4, 8), f"density of layers (down) and heads (right), {found.prompt_tokens} tokens", fill="black")
    for layer, densities in enumerate(found.heads):
        top = _MARGIN + layer * _CELL
        draw.text((4, top), str(layer), fill="black")
        for head, density in enumerate(densities):
            left = _MARGIN + head * _CELL
            draw.rectangle((left, top, left + _CELL - 2, top + _CELL - 2), fill=colour(density))
    top = _MARGIN + rows * _CELL
    draw.text(
        (4, top + 12), f"blocks of keys (right) of layer {found.layer}, head {found.head}, by block of queries", fill="black"
    )
    if size:
        image.paste(_mask(Image, found.blocks).resize((size, size), Image.Resampling.BOX), (_MARGIN, top + _MARGIN))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def _mask(module: Any, blocks: list[list[int]]) -> Any:
    count = len(blocks)
    image = module.new("RGB", (count, count), _OUTSIDE)
    for query, keys in enumerate(blocks):
        for key in range(query + 1):
            image.putpixel((key, query), _SPARSE)
        for key in keys:
            image.putpixel((key, query), _FULL)
    return image


def page(found: Explanation) -> str:
    """One HTML file with the picture, a table of the layers and the numbers."""
    report = found.report
    picture = base64.b64encode(png(found)).decode()
    rows = []
    for layer, densities in enumerate(found.heads):
        cells = "".join(
            f'<td style="background:rgb{colour(density)}" title="{"dense" if density is None else f"{density:.3f}"}"></td>'
            for density in densities
        )
        kinds = " | ".join(" ".join(segment[layer]) for segment in report.head_types)
        rows.append(f"<tr><th>{layer}</th>{cells}<td>{html.escape(kinds)}</td></tr>")
    title = html.escape(f"{found.model}: how a prompt of {found.prompt_tokens} tokens attends")
    data = html.escape(json.dumps(msgspec.to_builtins(found)))
    density = "none" if report.density is None else f"{report.density:.3f}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font-family:sans-serif}td{min-width:12px;height:12px}th{text-align:right}</style>"
        f"<h1>{title}</h1><p>{html.escape(report.mode)}, density {density}, threshold {report.threshold}, "
        f"{'routed as a whole' if report.exact else 'routed in segments'}</p>"
        f'<p><img alt="density of heads, and blocks of one head" src="data:image/png;base64,{picture}"></p>'
        f"<table>{''.join(rows)}</table><details><summary>JSON</summary><pre>{data}</pre></details></html>\n"
    )
