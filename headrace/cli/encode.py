"""``headrace encode``: pictures -> features, as safetensors files."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.options import ENGINE_OPTIONS, command
from headrace.config import EngineArgs
from headrace.errors import ConfigError
from headrace.sources.locate import locate

if TYPE_CHECKING:
    from headrace.multimodal.items import Picture

OPTIONS = ENGINE_OPTIONS.changed("model", positional=False).only(
    "model",
    *("device", "revision", "load_format", "dtype", "seed"),
    *("max_media_bytes", "max_image_pixels", "media_decode_seconds", "media_decode_memory", "media_workers"),
)


@command(args=OPTIONS)
def encode(
    args: EngineArgs,
    pictures: Annotated[list[Path], typer.Argument(help="Files of pictures.", metavar="FILE...", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Directory for the features. Default: that of each picture.", metavar="DIRECTORY"),
    ] = None,
) -> None:
    """Encode pictures with a model's vision part alone: FILE.safetensors has what the model would see of FILE.

    Prompts of the model take them as image_embeds in place of the pictures, on this machine or another.
    """
    locate(args.model)
    for path in pictures:
        if not path.is_file():
            raise ConfigError(f"there is no file {path}", "FILE")
    if output is not None and not output.is_dir():
        raise ConfigError(f"there is no directory {output}", "--output")
    targets = [(output or path.parent) / f"{path.stem}.safetensors" for path in pictures]
    if len(set(targets)) < len(targets):
        raise ConfigError("two pictures would be written to one file", "FILE")
    from safetensors.torch import save_file

    from headrace.engine.features import FeatureEncoder

    encoder = FeatureEncoder(args)
    loaded = zip(map(str, pictures), _loaded(args, pictures), strict=True)
    for path, target, tensors in zip(pictures, targets, encoder.encode(list(loaded)), strict=True):
        save_file(tensors, target)
        rows, hidden = tensors["features"].shape
        typer.echo(f"{target}: {rows} tokens of {hidden} numbers, {path}")


def _loaded(args: EngineArgs, paths: list[Path]) -> list[Picture]:
    """The pictures, decoded within the limits of the arguments."""
    from headrace.multimodal.media import MediaLoader

    loader = MediaLoader(args)

    async def load() -> list[Picture]:
        return [await loader.decoder.image(path.read_bytes(), str(path)) for path in paths]

    try:
        return asyncio.run(load())
    finally:
        loader.close()
