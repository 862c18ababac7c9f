"""Transformers' results for a prompt with media, and the positions of tokens found by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from headrace.core.media import ItemInputs, TensorData
from headrace.core.request import Request
from headrace.models.vision.encoder import patches_of
from headrace.multimodal.items import array_of
from headrace.multimodal.rules import Processed
from support.models.tiny_vision import IDS

BYTES = 256
"""Tokens that may be generated: transformers would take a placeholder for a picture that is missing."""
MEDIA = [IDS[token] for token in ("<|image_pad|>", "<|video_pad|>", "<|IMAGE_PLACEHOLDER|>", "<|VIDEO_PLACEHOLDER|>")]
SOFT = IDS["<image_soft_token>"]
ERNIE = [IDS[token] for token in IDS if token.startswith(("<|IMAGE_", "<|VIDEO_"))]
"""Tokens of pictures, those around them included."""


@dataclasses.dataclass
class Reference:
    """Greedy tokens and their logprobs."""

    token_ids: list[int]
    logprobs: list[float]


def tensor(data: TensorData) -> torch.Tensor:
    return torch.from_numpy(array_of(data).copy())


def encoder_input(item: ItemInputs | Processed, data: TensorData) -> torch.Tensor:
    """One of the tensors of an item, as the encoder gets it in float32."""
    made = tensor(data)
    return made if item.patches is None or made.dtype != torch.uint8 else patches_of(made, item.patches, torch.float32)


def inputs_of(request: Request) -> dict[str, torch.Tensor]:
    """The arguments of transformers' model beside the token ids."""
    inputs: dict[str, list[torch.Tensor]] = {}
    for item in request.media:
        for name, data in item.tensors.items():
            if item.modality == "video" and "image_grid_thw" in item.tensors:
                name = {"pixel_values": "pixel_values_videos", "image_grid_thw": "video_grid_thw"}[name]
            inputs.setdefault(name, []).append(encoder_input(item, data))
    return {name: torch.cat(padded(parts)) for name, parts in inputs.items()}


def padded(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Zeros behind each, as the processors of transformers have them where pictures differ in size."""
    shape = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    missing = [[most - size for most, size in zip(shape, part.shape[1:], strict=True)] for part in parts]
    ends = [[end for count in reversed(counts) for end in (0, count)] for counts in missing]
    return [torch.nn.functional.pad(part, end) for part, end in zip(parts, ends, strict=True)]


def positions_by_hand(request: Request, merge: int, rate: float | None, frames_apart: bool, seconds: Sequence[float]) -> list:
    """Token by token: text counts on, a medium counts by its grid, and text goes on after the highest position so far.

    Args:
        rate: positions in a second of a video; None: each temporal patch is one further.
        frames_apart: text stands between the temporal patches of a video, each of which counts as a picture.
        seconds: between temporal patches, of each video.
    """
    media, videos = iter(request.media), iter(seconds)
    out: list[list[int]] = [[], [], []]
    left: list[tuple[int, int, int]] = []
    base, highest, grids = 0, -1, []
    for token in request.prompt_token_ids:
        if token in MEDIA:
            if not left:
                if not grids:
                    item = next(media)
                    (grid,) = (data for name, data in item.tensors.items() if name.endswith("_grid_thw"))
                    time, tall, wide = tensor(grid)[0].tolist()
                    time = time // 2 if "video_grid_thw" in item.tensors else time
                    step = 1.0 if rate is None or item.modality == "image" else rate * next(videos)
                    whole = [
                        (int(t * step), y, x) for t in range(time) for y in range(tall // merge) for x in range(wide // merge)
                    ]
                    count = len(whole) // time if frames_apart and item.modality == "video" else len(whole)
                    grids = [
                        [(0 if frames_apart else t, y, x) for t, y, x in whole[at : at + count]]
                        for at in range(0, len(whole), count)
                    ]
                left, base = grids.pop(0), highest + 1
            place = left.pop(0)
            own = [base + axis for axis in place]
        else:
            own = [highest + 1] * 3
        for axis in range(3):
            out[axis].append(own[axis])
        highest = max(highest, *own)
    return out


@torch.no_grad()
def logprobs(model: PreTrainedModel, request: Request, ids: list[int], positions: list | None) -> torch.Tensor:
    """``[tokens, vocabulary]`` of a prompt and generated tokens behind it. ``positions``: as of ``generated``."""
    given = torch.tensor([ids])
    more: dict[str, torch.Tensor] = {}
    if positions is None and SOFT in ids:
        more["token_type_ids"] = (given == SOFT).int()
    elif positions is not None:
        after = np.array(positions).max() + 1 + np.arange(len(ids) - len(positions[0]))
        of_media = [token in ERNIE for token in request.prompt_token_ids]
        if any(of_media):
            of_media += [False] * (len(ids) - len(of_media))
            more["moe_mm_token_type_ids"] = torch.tensor([of_media]).int()
        more["position_ids"] = torch.tensor([[*axis, *after] for axis in positions])[:, None]
    found: torch.Tensor = model(input_ids=given, use_cache=False, **inputs_of(request), **more).logits[0].log_softmax(-1)
    return found


def generated(
    model: PreTrainedModel, request: Request, steps: int, positions: list | None, allowed: Sequence[Sequence[int]] = ()
) -> Reference:
    """Greedy generation without a cache: every step computes the whole sequence.

    Args:
        positions: ``[3, prompt]``; None: those of the tokens.
        allowed: the tokens that each step may choose from; empty: bytes.
    """
    ids, found = list(request.prompt_token_ids), Reference([], [])
    for step in range(steps):
        logits = logprobs(model, request, ids, positions)[-1]
        token = max(allowed[step] if allowed else range(BYTES), key=lambda each: float(logits[each]))
        ids.append(token)
        found.token_ids.append(token)
        found.logprobs.append(float(logits[token]))
    return found
