"""Tiny vision models served, and what transformers says of their pictures and videos."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import PreTrainedModel

from headrace import LLM, SamplingParams
from headrace.core.request import Request
from headrace.multimodal.items import MultiModalData, array_of
from headrace.outputs import RequestOutput
from support.models import tiny_vision
from support.runner.harness import media_of
from support.vision_reference import BYTES, Reference, generated, logprobs, positions_by_hand

STEPS = 6
PICTURE, VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
RATES: dict[str, float | None] = {
    "qwen2_vl": None,
    "qwen2_5_vl": 2.0,
    "qwen3_vl": None,
    "qwen3_vl_moe": None,
    "qwen3_5": None,
    "ernie4_5_vl_moe": None,
}
"""Kinds with positions in time, height and width -> positions in a second of a video."""
MOVING = list(RATES)
ALONE = ["gemma3", "llava", "llava_pixtral", "mistral3", "internvl", "idefics3", "smolvlm"]
"""Kinds without positions in time, height and width."""
APART = ("idefics3", "smolvlm")
"""Grids of different pictures have different numbers of rows for a part: their features are given one by one."""
QUICK = ("qwen2_5_vl", "qwen3_vl", "ernie4_5_vl_moe", "gemma3", "llava", "mistral3", "internvl", "idefics3")
MARKS = {
    "gemma3": "<start_of_image>",
    **dict.fromkeys(("llava_pixtral", "mistral3"), "[IMG]"),
    **dict.fromkeys(("llava", "idefics3", "smolvlm"), "<image>"),
    "internvl": "<IMG_CONTEXT>",
    "ernie4_5_vl_moe": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
}
"""What stands for a picture; Qwen's is the default."""
CLIPS = {"ernie4_5_vl_moe": "<|VIDEO_START|><|VIDEO_PLACEHOLDER|><|VIDEO_END|>"}


def of(kinds: list[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in kinds])


@dataclasses.dataclass
class Served:
    kind: str
    folder: Path
    theirs: PreTrainedModel
    llm: LLM

    def request(self, prompt: Any) -> Request:
        return self.llm.inputs.request(prompt, SamplingParams(), request_id="made")

    def expected(self, prompt: Any, seconds: tuple[float, ...] = (), allowed: Sequence[Sequence[int]] = ()) -> Reference:
        request = self.request(prompt)
        positions = None
        if self.kind in RATES:
            apart = self.kind.startswith("qwen3")
            positions = positions_by_hand(request, 2, RATES[self.kind], apart, seconds)
        return generated(self.theirs, request, STEPS, positions, allowed)

    def prompt_logprobs(self, prompt: Any) -> list[float]:
        """Of the prompt's tokens behind the first."""
        request = self.request(prompt)
        ids = list(request.prompt_token_ids)
        positions = positions_by_hand(request, 2, RATES[self.kind], False, ()) if self.kind in RATES else None
        return logprobs(self.theirs, request, ids, positions)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


@functools.cache
def served(kind: str) -> Served:
    folder = Path(tempfile.mkdtemp(prefix=f"pictures-{kind}-"))
    theirs = tiny_vision.save(kind, folder)
    return Served(kind, folder, theirs, engine(folder))


def engine(folder: Path, **changes: Any) -> LLM:
    fields: dict[str, Any] = {
        "max_model_len": 512,
        "num_kv_blocks": 200,
        "dtype": "float32",
        "max_num_batched_tokens": 96,
        "num_threads": 1,
    }
    return LLM(model=str(folder), **fields | changes)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed + 1000 * width + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def video(frames: int, width: int = 60, height: int = 90, **metadata: Any) -> tuple[np.ndarray, dict[str, Any]]:
    return np.random.default_rng(frames).integers(0, 256, (frames, height, width, 3), dtype=np.uint8), metadata


def generate(llm: LLM, *prompts: Any, **sampling: Any) -> list[RequestOutput]:
    params = SamplingParams(
        **{"temperature": 0.0, "max_tokens": STEPS, "logprobs": 0, "allowed_token_ids": list(range(BYTES))} | sampling
    )
    return llm.generate(list(prompts), params)


def same(output: RequestOutput, expected: Reference) -> None:
    (sample,) = output.outputs
    assert sample.token_ids == expected.token_ids
    found = [next(iter(entry.values())).logprob for entry in sample.logprobs or []]
    assert found == pytest.approx(expected.logprobs, abs=1e-4)


def prompts(kind: str) -> dict[str, Any]:
    """Each with other pictures."""
    mark = MARKS.get(kind, PICTURE)
    own = picture(100, 60, 1)
    small = picture(5, 29 if kind == "mistral3" else 7)
    return {
        "small": {"prompt": f"a{mark}b", "multi_modal_data": {"image": small}},
        "odd": {"prompt": f"{mark} what is it?", "multi_modal_data": {"image": [picture(31, 190)]}},
        "wide": {"prompt": f"say {mark}", "multi_modal_data": {"image": np.asarray(picture(211, 40))}},
        "two": {"prompt": f"{mark}, and{mark}: which?", "multi_modal_data": {"image": [picture(90, 61), picture(57, 113)]}},
        "beside": {"prompt": f"{mark}{mark}", "multi_modal_data": {"image": [picture(84, 56), picture(56, 84)]}},
        "same twice": {"prompt": f"{mark} or {mark}.", "multi_modal_data": {"image": [own, own]}},
    }


def videos(kind: str) -> dict[str, tuple[Any, tuple[float, ...]]]:
    """Prompt, and seconds between the temporal patches of each video."""
    mark, clip = MARKS.get(kind, PICTURE), CLIPS.get(kind, VIDEO)
    spaced = {"fps": 2.0, "do_sample_frames": False}
    slow, quick = video(7, fps=0.5, do_sample_frames=False), {"fps": 3.0, "do_sample_frames": False}
    return {
        "video": ({"prompt": f"see {clip} end", "multi_modal_data": {"video": [video(4, **spaced)]}}, (1.0,)),
        "slow video": ({"prompt": f"{clip} end", "multi_modal_data": {"video": slow}}, (4.0,)),
        "mixed": (
            {
                "prompt": f"{mark} then {clip} then {mark} then {clip}!",
                "multi_modal_data": {"image": [picture(60, 60), picture(30, 99)], "video": [slow, video(5, 44, 56, **quick)]},
            },
            (4.0, 2 / 3),
        ),
    }


def encoded(own: Served, prompt: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The prompt with features in place of its media, all of one modality."""
    request = own.request(prompt)
    encoder = media_of(own.llm._engine.executor.runner)._encoder
    made = [encoder.encode([item])[0] for item in request.media]
    if own.kind in ALONE:
        media = MultiModalData.of(prompt["multi_modal_data"]).items()
        grids = [own.llm.inputs.multimodal._rules.process(one, {}, "medium")[0].grid for _, one in media]
    else:
        grids = [
            tuple(array_of(tensor)[0].tolist())
            for item in request.media
            for name, tensor in item.tensors.items()
            if name.endswith("_grid_thw")
        ]
    if own.kind in APART:
        parts = [{"features": one.features, "grid_thw": [grid], **more} for one, grid in zip(made, grids, strict=True)]
        return {"prompt": prompt["prompt"], "multi_modal_data": {f"{request.media[0].modality}_embeds": parts}}
    embeds: dict[str, Any] = {"features": torch.cat([one.features for one in made]), "grid_thw": grids}
    if made[0].deepstack is not None:
        embeds["deepstack"] = torch.cat([one.deepstack for one in made], dim=1)
    data = {f"{request.media[0].modality}_embeds": embeds}
    return {"prompt": prompt["prompt"], "multi_modal_data": data}
