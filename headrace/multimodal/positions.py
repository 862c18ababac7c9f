"""Rotary positions of a prompt with media, in time, height and width (M-RoPE)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.core.media import RopePositions


class Run(NamedTuple):
    """Feature tokens of one picture, or of a video or a part of it, that follow each other."""

    start: int
    length: int
    block: tuple[int, int, int]
    """Tokens in time, height and width."""
    interval: float
    """Positions between two of them in time."""


def rope_positions(num_prompt: int, runs: Sequence[Run]) -> RopePositions:
    """Positions of a prompt's tokens.

    Text counts on in all three. A run's tokens have their place in its block, from where the text before it ended, and text
    goes on after the highest position of the run, as the authors of Qwen2-VL have it.
    """
    positions = np.empty((3, num_prompt), dtype=np.int32)
    token, position = 0, 0
    for run in runs:
        position = _text(positions, token, run.start, position)
        token = run.start + run.length
        block = _block(run)
        positions[:, run.start : token] = position + block
        position += int(block.max()) + 1
    end = _text(positions, token, num_prompt, position)
    return RopePositions(positions.astype("<i4").tobytes(), end - num_prompt)


def _text(positions: npt.NDArray[np.int32], start: int, end: int, position: int) -> int:
    """Fills in text. Returns the position that follows."""
    positions[:, start:end] = np.arange(position, position + end - start)
    return position + end - start


def _block(run: Run) -> npt.NDArray[np.int64]:
    """``[3, length]``, from 0."""
    time, height, width = (np.arange(size) for size in run.block)
    # transformers multiplies in float32.
    time = (time.astype(np.float32) * np.float32(run.interval)).astype(np.int64)
    return np.stack(np.meshgrid(time, height, width, indexing="ij")).reshape(3, -1)
