"""Videos of Qwen's models before the encoder: which frames, how large, and what the prompt says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import transformers.video_utils
from PIL import Image
from support.models import tiny_vision
from support.served_pictures import VIDEO, video
from support.vision_reference import encoder_input

from headrace.multimodal.families import media_rules
from headrace.multimodal.items import Video, array_of
from headrace.multimodal.rules import Processed

from .processing import prepare, processor

SIZES = [(60, 90, 8), (90, 61, 5), (33, 170, 4), (140, 20, 7), (220, 180, 6)]
"""Width, height, frames."""


def made(folder: Path, kind: str, frames: np.ndarray, metadata: dict[str, Any], **options: Any) -> Processed:
    (found,) = processor(folder, kind, max_model_len=4096)._rules.process(Video(frames, metadata), options, "video")
    return found


def patches(one: Processed) -> int:
    return int(array_of(one.tensors["image_grid_thw"])[0, 0])


def test_frames_are_not_sampled_twice(tmp_path: Path) -> None:
    """Qwen3-VL samples 2 frames a second, at least 4, unless they are a sample already."""
    frames, _ = video(8)
    for metadata, count in (
        ({"fps": 4.0}, 2),
        ({}, 2),
        ({"fps": 4.0, "do_sample_frames": False}, 4),
        ({"do_sample_frames": False}, 4),
    ):
        assert patches(made(tmp_path / "3", "qwen3_vl", frames, metadata)) == count
        assert patches(made(tmp_path / "2.5", "qwen2_5_vl", frames, metadata)) == 4, "it takes every frame"


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "internvl", "smolvlm"])
def test_what_a_caller_has_stays_as_it_is(tmp_path: Path, kind: str) -> None:
    frames, _ = video(4)
    metadata = {"fps": 2.0, "frames_indices": [0, 2, 4, 6], "total_num_frames": 8}
    before, known = frames.copy(), json.dumps(metadata)
    made(tmp_path, kind, frames, metadata)
    assert (frames == before).all() and json.dumps(metadata) == known


def test_times_stand_between_the_marks_of_the_template(tmp_path: Path) -> None:
    """The marks are those of transformers 5: one around each temporal patch, and the template's around all of them."""
    whole = processor(tmp_path, "qwen3_vl", max_model_len=4096)
    clip = video(6, fps=2.0, do_sample_frames=False)
    found = prepare(whole, f"see {VIDEO}", {"video": clip}).token_ids
    names = [tiny_vision.SPECIAL[token - 256] if token >= 256 else chr(token) for token in found]
    text = "".join(name for name in names if name != "<|video_pad|>")
    marks = "".join(f"<{time} seconds><|vision_start|><|vision_end|>" for time in ("0.2", "1.2", "2.2"))
    assert text == f"see <|vision_start|>{marks}<|vision_end|>"


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("fps", [None, 2.0, 30.0])
def test_pixels_are_those_of_transformers(tmp_path: Path, kind: str, fps: float | None) -> None:
    """Enlarged to the least that the model's settings say, and reduced to the most."""
    pytest.importorskip("torchvision")
    processor(tmp_path, kind)
    factory = {"qwen3_vl": "Qwen3VLVideoProcessor"}.get(kind, "Qwen2VLVideoProcessor")
    settings = {"patch_size": 16 if kind == "qwen3_vl" else 14, "temporal_patch_size": 2, "merge_size": 2}
    size = {"shortest_edge": 4 * 56 * 56, "longest_edge": 20 * 28 * 28 * 4}
    (tmp_path / "video_preprocessor_config.json").write_text(
        json.dumps({"video_processor_type": factory, "size": size} | settings)
    )
    rules = media_rules(kind, tmp_path, transformers.AutoConfig.from_pretrained(tmp_path))
    theirs = transformers.AutoVideoProcessor.from_pretrained(tmp_path)
    for width, height, count in SIZES:
        frames, _ = video(count, width, height)
        metadata = {"fps": fps, "total_num_frames": count, "frames_indices": list(range(count)), "do_sample_frames": False}
        (found,) = rules.process(
            Video(frames, {name: value for name, value in metadata.items() if value is not None}), {}, "video"
        )
        known = transformers.video_utils.VideoMetadata(total_num_frames=count, fps=fps, frames_indices=list(range(count)))
        expected = theirs(videos=[frames], video_metadata=[known], do_sample_frames=False, return_tensors="pt")
        assert array_of(found.tensors["image_grid_thw"]).tolist() == expected["video_grid_thw"].tolist(), (width, height)
        assert torch.equal(encoder_input(found, found.tensors["pixel_values"]), expected["pixel_values_videos"])


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl", "ernie4_5_vl_moe", "internvl"])
@pytest.mark.parametrize("resample", [2, 3])
def test_frames_of_odd_sizes_are_resized_as_torchvision_does(
    tmp_path: Path, kind: str, resample: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is there or not: transformers has no video processor without it, and its filters are torch's."""
    monkeypatch.setattr("headrace.multimodal.backend._usable_backend", lambda: "pil")
    processor(tmp_path, kind)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"resample": resample, "draw_on_frames": False}))
    rules: Any = media_rules(kind, tmp_path, transformers.AutoConfig.from_pretrained(tmp_path))
    for width, height in ((61, 93), (157, 45), (33, 29)):
        frames, metadata = video(4, width, height, fps=2.0, do_sample_frames=False)
        (found,) = rules.process(Video(frames, metadata), {}, "video")
        made = array_of(found.tensors["pixel_values_videos" if kind.startswith("ernie") else "pixel_values"])
        size = made.shape[-2:] if kind == "internvl" else made.shape[1:3]
        assert size != (height, width)
        mode, pixels = {2: "bilinear", 3: "bicubic"}[resample], torch.from_numpy(frames).permute(0, 3, 1, 2)
        pixels = pixels if mode == "bicubic" or torch.backends.cpu.get_cpu_capability().startswith("AVX") else pixels.float()
        expected = torch.nn.functional.interpolate(pixels, tuple(size), mode=mode, align_corners=False, antialias=True)
        resized = expected.round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
        by_pil = np.stack([np.asarray(Image.fromarray(frame).resize(size[::-1], resample)) for frame in frames])
        assert mode == "bilinear" or (by_pil != resized).any()
        if kind == "internvl":
            resized = np.concatenate(
                [array_of(rules._images(frame, "", crop_to_patches=False)["pixel_values"]) for frame in resized]
            )
        assert (made == resized).all(), (width, height)
