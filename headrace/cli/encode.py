"""``headrace encode``: pictures -> features, as safetensors files."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headrace.cli.options import ENGINE_OPTIONS, Group, command
from headrace.cli.own_options import EncodeOptions
from headrace.config import EngineArgs
from headrace.errors import ConfigError, EngineError
from headrace.host.user_files import read_input

if TYPE_CHECKING:
    import torch

OPTIONS = ENGINE_OPTIONS.changed("model", positional=False).only(
    "model",
    *("device", "revision", "load_format", "dtype", "seed"),
    *("max_media_bytes", "max_image_pixels", "media_decode_seconds", "media_decode_memory", "media_workers"),
)


@command(args=OPTIONS, options=Group.of(EncodeOptions))
def encode(args: EngineArgs, options: EncodeOptions) -> None:
    """Encode pictures with a model's vision part alone: FILE.safetensors has what the model would see of FILE.

    Prompts of the model take them as image_embeds in place of the pictures, on this machine or another.
    """
    pictures = options.pictures
    targets = [(options.output or path.parent) / f"{path.stem}.safetensors" for path in pictures]
    if len(set(targets)) < len(targets):
        raise ConfigError("two pictures would be written to one file", "FILE")
    for path, target in itertools.product(pictures, targets):
        if target.exists() and path.samefile(target):
            raise ConfigError(f"{path} is a picture, and features would replace it: choose another --output", "FILE")
    from headrace.frontend.features import FeatureEncoder

    encoder = FeatureEncoder(args)
    read = ((str(path), read_input(path, "FILE", args.max_media_bytes, " (--max-media-bytes)")) for path in pictures)
    for path, target, tensors in zip(pictures, targets, encoder.encode(read), strict=True):
        _write(tensors, target)
        rows, hidden = tensors["features"].shape
        typer.echo(f"{target}: {rows} tokens of {hidden} numbers, {path}")


def _write(tensors: dict[str, torch.Tensor], target: Path) -> None:
    """Replaces the file atomically: a full disk leaves an earlier one as it was."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    partial = target.with_name(target.name + ".partial")
    try:
        save_file(tensors, partial)
        partial.replace(target)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise EngineError(f"cannot write {target}: {getattr(error, 'strerror', None) or error}") from None
