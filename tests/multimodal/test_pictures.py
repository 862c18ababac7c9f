"""Prompts with pictures and videos get what transformers computes for them, token for token."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.models import tiny_vision
from support.runner.harness import media_of
from support.served_pictures import (
    ALONE,
    CLIPS,
    MARKS,
    MOVING,
    PICTURE,
    STEPS,
    VIDEO,
    encoded,
    engine,
    generate,
    of,
    picture,
    prompts,
    same,
    served,
    video,
    videos,
)
from support.vision_reference import generated

from headrace import SamplingParams
from headrace.errors import ConfigError, RequestError
from headrace.models.vision.interface import CALL_ROWS
from headrace.startup.vision import encoder_calls


@of([*MOVING, *ALONE])
def test_pictures_equal_transformers(kind: str) -> None:
    """All in one batch, in chunks of pictures and text, beside a prompt of text."""
    own = served(kind)
    cases = prompts(kind)
    outputs = generate(own.llm, *cases.values(), "text alone")
    for prompt, output in zip(cases.values(), outputs, strict=False):
        same(output, own.expected(prompt))
    (text,) = generate(engine(own.folder, limit_mm_per_prompt={"image": 0, "video": 0}), "text alone")
    assert text.outputs[0].token_ids == outputs[-1].outputs[0].token_ids
    own.llm.check_integrity()
    decisions = {line.name: line.value for line in own.llm.info.decisions}
    assert (decisions["vision encoder"], decisions["image processor"]) == ("transformers", own.llm.inputs.multimodal.backend)


@of(MOVING)
def test_videos_equal_transformers(kind: str) -> None:
    own = served(kind)
    cases = videos(kind)
    outputs = generate(own.llm, *(prompt for prompt, _ in cases.values()))
    for (prompt, seconds), output in zip(cases.values(), outputs, strict=True):
        same(output, own.expected(prompt, seconds))


def frames_of(kind: str) -> dict[str, Any]:
    """Videos of a model that sees their frames as pictures."""
    mark, clip = MARKS[kind], video(3, 44, 56, fps=2.0)
    own = {"prompt": "see <video> end", "multi_modal_data": {"video": [clip]}}
    mixed = {"image": [picture(60, 61), picture(30, 99)], "video": [video(1), clip]}
    return {
        "video": own,
        "mixed": {"prompt": f"{mark} then <video> then {mark} then <video>!", "multi_modal_data": mixed},
        "sampled": own | {"mm_processor_kwargs": {"num_frames": 2}},
    }


@pytest.mark.parametrize("kind", ["internvl", "smolvlm"])
def test_videos_of_frames_equal_transformers(kind: str) -> None:
    own = served(kind)
    cases = frames_of(kind)
    feature = tiny_vision.IDS[MARKS[kind]]
    frame = 4
    for name, output in zip(cases, generate(own.llm, *cases.values()), strict=True):
        same(output, own.expected(cases[name]))
        frames = {"video": 3, "mixed": 4, "sampled": 2}[name]
        pictures = sum(item.num_rows for item in own.request(cases[name]).media if item.modality == "image")
        assert (output.prompt_token_ids or []).count(feature) == pictures + frame * frames
    own.llm.reset_prefix_cache()
    (expected,) = generate(own.llm, cases["video"])
    own.llm.reset_prefix_cache()
    more = {"second_per_grid": [0.5]} if kind == "smolvlm" else {}
    (found,) = generate(own.llm, encoded(own, cases["video"], **more))
    assert found.outputs[0].logprobs == expected.outputs[0].logprobs


def said(kind: str) -> tuple[str, str]:
    """The text of a video's prompt with one mark for all features of a frame, and the mark."""
    own, mark = served(kind), MARKS[kind]
    ids = own.request(frames_of(kind)["video"]).prompt_token_ids
    return own.llm.get_tokenizer().decode(ids, skip_special_tokens=False).replace(4 * mark, mark), mark


def test_frames_are_numbered_or_have_their_time() -> None:
    text, mark = said("internvl")
    frame = f": <img>{mark}</img>"
    assert text == f"see Frame1{frame}\nFrame2{frame}\nFrame3{frame} end"
    text, mark = said("smolvlm")
    frame = f":<fake_token_around_image><global-img>{mark}<fake_token_around_image>"
    assert text == (
        "see You are provided the following series of three frames from a 0:00:01 [H:MM:SS] video.\n\n"
        f"Frame from 00:00{frame}\nFrame from 00:00{frame}\nFrame from 00:01{frame}\n\n end"
    )


def test_a_conversation_has_videos_that_its_template_does_not_know() -> None:
    own = served("smolvlm")
    clip, _ = video(2)
    parts: Any = [{"type": "video", "video": (clip, {"fps": 1.0})}, {"type": "text", "text": "what? <video>"}]
    prompt: Any = own.llm.inputs.chat_prompt([{"role": "user", "content": parts}])
    broken = "<\u200bvideo>"
    assert prompt["prompt"] == f"[user]<video>what? {broken}[assistant]"
    (output,) = own.llm.chat([{"role": "user", "content": parts}], SamplingParams(max_tokens=1))
    assert (output.prompt_token_ids or []).count(tiny_vision.IDS["<image>"]) == 8


def test_a_loaded_conversation_keeps_its_part_of_the_budget() -> None:
    inputs = served("qwen2_vl").llm.inputs
    assert inputs.media is not None
    budget = inputs.media.budget
    buffer = io.BytesIO()
    Image.new("RGB", (40, 30)).save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]

    async def run() -> None:
        async with inputs.loaded_chat_prompt(messages) as loaded:
            assert inputs.prompt_token_ids(loaded) == inputs.prompt_token_ids(inputs.chat_prompt(messages))
            assert budget.used > 40 * 30
        assert budget.used == 0

    asyncio.run(run())


@of([*MOVING, *ALONE])
def test_features_give_what_their_pictures_give(kind: str) -> None:
    """Bit for bit, with an encoder or without."""
    own = served(kind)
    without = engine(own.folder, mm_encoder="none", enable_prefix_caching=False)
    assert "vision encoder" not in {line.name for line in without.info.memory}
    for name, prompt in prompts(kind).items():
        own.llm.reset_prefix_cache()
        (expected,) = generate(own.llm, prompt)
        (found,) = generate(without, encoded(own, prompt))
        assert found.prompt_token_ids == expected.prompt_token_ids, name
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        assert found.outputs[0].logprobs == expected.outputs[0].logprobs
    with pytest.raises(RequestError, match=r"no vision encoder .* image_embeds"):
        generate(without, prompts(kind)["small"])


@of([kind for kind in MOVING if kind not in ("qwen2_vl", "ernie4_5_vl_moe")])
def test_features_of_a_video_bring_its_seconds(kind: str) -> None:
    own = served(kind)
    prompt, (seconds,) = videos(kind)["video"]
    own.llm.reset_prefix_cache()
    (expected,) = generate(own.llm, prompt)
    given = encoded(own, prompt)
    embeds = given["multi_modal_data"]["video_embeds"]
    with pytest.raises(RequestError, match="second_per_grid is missing") as caught:
        generate(own.llm, given)
    assert caught.value.param == "multi_modal_data.video_embeds[0].second_per_grid"
    own.llm.reset_prefix_cache()
    (found,) = generate(own.llm, given | {"multi_modal_data": {"video_embeds": embeds | {"second_per_grid": [seconds]}}})
    assert found.outputs[0].logprobs == expected.outputs[0].logprobs


@of(["qwen3_vl", "smolvlm"])
def test_features_of_a_video_bring_their_times(kind: str) -> None:
    """The last patch of an odd number of frames is not whole, and a sample's frames need not be evenly spaced."""
    own = served(kind)
    clip = CLIPS.get(kind, VIDEO) if kind != "smolvlm" else "<video>"
    indices, fps = [0, 7, 21, 25, 42], 10.0
    metadata = {"fps": fps, "frames_indices": indices, "total_num_frames": 60, "do_sample_frames": False}
    prompt = {"prompt": f"see {clip}", "multi_modal_data": {"video": video(5, **metadata)}}
    given = encoded(own, prompt)
    embeds = given["multi_modal_data"]["video_embeds"]
    embeds = embeds[0] if kind == "smolvlm" else embeds
    times = [0.35, 2.3, 4.2] if kind == "qwen3_vl" else [index / fps for index in indices]
    for timestamps in (times, np.array(times)):
        found = own.request(given | {"multi_modal_data": {"video_embeds": embeds | {"timestamps": timestamps}}})
        assert found.prompt_token_ids == own.request(prompt).prompt_token_ids
    for wrong in (times[1:], [-1.0, *times[1:]], [[time] for time in times]):
        with pytest.raises(RequestError, match=f"must be {len(times)} seconds from 0 to") as caught:
            own.request(given | {"multi_modal_data": {"video_embeds": embeds | {"timestamps": wrong}}})
        assert caught.value.param == "multi_modal_data.video_embeds.timestamps"


@of(["qwen3_vl"])
def test_features_at_urls_are_those_of_the_picture(kind: str) -> None:
    from safetensors.torch import save

    own = served(kind)
    prompt = prompts(kind)["small"]
    own.llm.reset_prefix_cache()
    (expected,) = generate(own.llm, prompt)
    embeds = encoded(own, prompt)["multi_modal_data"]["image_embeds"]

    def asked(features: torch.Tensor) -> dict[str, Any]:
        file = save(embeds | {"features": features, "grid_thw": torch.tensor(embeds["grid_thw"])})
        url = f"data:application/octet-stream;base64,{base64.b64encode(file).decode()}"
        return {"prompt": prompt["prompt"], "multi_modal_data": {"image_feature_urls": [url]}}

    own.llm.reset_prefix_cache()
    (found,) = generate(own.llm, asked(embeds["features"]))
    assert found.prompt_token_ids == expected.prompt_token_ids
    assert found.outputs[0].logprobs == expected.outputs[0].logprobs
    with pytest.raises(RequestError, match="expected hidden size") as caught:
        generate(own.llm, asked(embeds["features"][:, 1:].contiguous()))
    assert caught.value.param == "multi_modal_data.image_feature_urls[0].features"


def test_times_are_for_prompts_that_say_them() -> None:
    own = served("qwen2_5_vl")
    given = encoded(own, videos("qwen2_5_vl")["video"][0])
    given["multi_modal_data"]["video_embeds"] |= {"second_per_grid": [1.0], "timestamps": [0.0, 1.0]}
    with pytest.raises(RequestError, match=r"timestamps: expected none, since the prompt says no times, not 2 numbers"):
        own.request(given)


@of(["qwen2_5_vl", "gemma3", "mistral3", "ernie4_5_vl_moe"])
def test_a_cached_prefix_covers_equal_pictures_alone(kind: str) -> None:
    own = served(kind)
    mark = MARKS.get(kind, PICTURE)
    text = "some words before this picture, " + mark + " and quite a few more words behind it"
    one, other = picture(112, 112, 5), picture(112, 112, 6)
    own.llm.reset_prefix_cache()
    first, second, third = (
        generate(own.llm, {"prompt": text, "multi_modal_data": {"image": each}})[0] for each in (one, one, other)
    )
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, (len(first.prompt_token_ids or []) - 1) // 16 * 16)
    (item,) = own.request({"prompt": text, "multi_modal_data": {"image": one}}).items
    assert third.num_cached_tokens == item.start // 16 * 16 == 32
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert third.outputs[0].logprobs != first.outputs[0].logprobs
    same(third, own.expected({"prompt": text, "multi_modal_data": {"image": other}}))


def test_a_wrong_picture_ends_the_call() -> None:
    """Those that run already are aborted, and the engine goes on."""
    own = served("qwen2_5_vl")
    good = {"prompt": f"a{PICTURE}b", "multi_modal_data": {"image": picture(40, 30)}}
    wrong = {"prompt": f"{PICTURE}", "multi_modal_data": {"image": picture(1000, 4)}}
    with pytest.raises(RequestError, match="ratio"):
        generate(own.llm, *[good] * 12, wrong)
    assert own.llm.stats.num_running == own.llm.stats.num_waiting == 0
    same(generate(own.llm, good)[0], own.expected(good))


@of(["qwen2_5_vl", "gemma3", "idefics3"])
def test_the_encoders_memory_is_measured_with_full_calls_and_large_pictures(kind: str) -> None:
    own = served(kind)
    loaded: Any = own.llm._engine
    encoder = media_of(loaded.executor.runner)._encoder
    usual, large = encoder_calls(loaded.text.files, loaded.config, encoder)
    rows = sum(item.num_rows for item in usual.args[0])
    assert CALL_ROWS <= rows < CALL_ROWS + 512
    assert all(found.features.shape == (item.num_rows, 64) for found, item in zip(large(), large.args[0], strict=True))
    assert encoder_calls(loaded.text.files, loaded.config, None) == []


def test_what_a_tower_makes_is_freed_after_use() -> None:
    own = served("qwen2_5_vl")
    cache = media_of(own.llm._engine.executor.runner).cache
    assert cache.num_used == 0 and cache.nbytes > 0
    none = engine(own.folder, mm_encoder_cache_bytes=0)
    generate(none, *prompts("qwen2_5_vl").values())
    cache = media_of(none._engine.executor.runner).cache
    assert (cache.num_used, cache.nbytes) == (0, 0)


@pytest.mark.parametrize("kind", [pytest.param("qwen2_vl", marks=pytest.mark.slow), "qwen2_5_vl"])
def test_a_checkpoint_of_2024_is_the_same_model(kind: str, tmp_path: Path) -> None:
    """A flat configuration with ``rope_scaling``, and ``min_pixels`` and ``max_pixels`` of the processor."""
    own = served(kind)
    shutil.copytree(own.folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    sections = text.pop("rope_parameters")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": sections["mrope_section"]}
    text["rope_theta"] = sections["rope_theta"]
    for name in ("model_type", "layer_types", "dtype"):
        text.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(text | config))
    prompt = prompts(kind)["two"]
    (found,), (expected,) = generate(engine(tmp_path), prompt), generate(own.llm, prompt)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


@of([*MOVING, *ALONE])
def test_what_stands_for_media_is_refused_without_them(kind: str) -> None:
    """As token ids and as text. Words of SmolVLM's videos are not tokens."""
    llm = served(kind).llm
    processor, tokenizer = llm.inputs.multimodal, llm.inputs.tokenizer
    assert processor is not None and tokenizer is not None
    rules = processor._rules
    texts = {*rules.placeholders.values(), *rules.feature_tokens.values()} - {
        rules.placeholders[kind] for kind in rules.written
    }
    for text in sorted(texts):
        token = tokenizer.token_to_id(text)
        assert token is not None
        for prompt in (f"a{text}b", {"prompt_token_ids": [97, token, 98]}, {"prompt": text, "multi_modal_data": {}}):
            with pytest.raises(RequestError, match=rf"the prompt has the token {token} .* no multi_modal_data\.") as caught:
                generate(llm, prompt)
            assert caught.value.param == "prompt"
    video_mark = rules.placeholders.get("video")
    if processor.limits.get("video") and video_mark != rules.placeholders["image"]:
        prompt = {"prompt": f"{MARKS.get(kind, PICTURE)}{video_mark}", "multi_modal_data": {"image": picture(60, 60)}}
        with pytest.raises(RequestError, match=r"placeholders .* for 0 videos"):
            generate(llm, prompt)


@pytest.mark.parametrize(
    "kind",
    [
        "qwen2_5_vl",
        "ernie4_5_vl_moe",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gemma3", "llava", "mistral3", "internvl", "smolvlm")),
    ],
)
def test_checkpoints_with_the_modules_names_are_read(kind: str, tmp_path: Path) -> None:
    """transformers saves the names of published checkpoints; its modules have others."""
    from safetensors.torch import save_file

    own = served(kind)
    shutil.copytree(own.folder, tmp_path, dirs_exist_ok=True)
    state = own.theirs.state_dict()
    state.pop("lm_head.weight" if own.theirs.config.tie_word_embeddings else "", None)
    save_file({name: tensor.contiguous().clone() for name, tensor in state.items()}, tmp_path / "model.safetensors")
    prompt = prompts(kind)["two"]
    (found,), (expected,) = generate(engine(tmp_path), prompt), generate(own.llm, prompt)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_weight_of_the_vision_part_that_nothing_loads_is_an_error(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(served("qwen2_5_vl").folder, tmp_path, dirs_exist_ok=True)
    state = load_file(tmp_path / "model.safetensors")
    save_file(state | {"visual.blocks.0.gate.weight": torch.ones(4)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"no module has a place for, .*visual\.blocks\.0\.gate\.weight"):
        engine(tmp_path)


def test_the_text_part_may_say_whether_weights_are_tied(tmp_path: Path) -> None:
    """As in published checkpoints of Mistral 3, which leave it out: the whole's class would tie them."""
    from safetensors.torch import load_file, save_file

    own = served("mistral3")
    shutil.copytree(own.folder, tmp_path, dirs_exist_ok=True)
    state = load_file(tmp_path / "model.safetensors")
    head = state["language_model.model.embed_tokens.weight"].flip(0)
    save_file(state | {"language_model.lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    theirs = type(own.theirs).from_pretrained(tmp_path).train(False)
    del config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompt = prompts("mistral3")["two"]
    (found,) = generate(engine(tmp_path), prompt)
    same(found, generated(theirs, own.request(prompt), STEPS, None))


def test_an_update_has_no_weights_of_the_encoder() -> None:
    """They would keep their old values."""
    own = served("qwen2_5_vl")
    state = own.theirs.state_dict()
    with pytest.raises(ConfigError, match=r"model\.visual\.\S+ is of the vision encoder"):
        own.llm.update_weights(state)
    assert own.llm.update_weights({name: tensor for name, tensor in state.items() if ".visual." not in name}) > 20


@pytest.mark.slow
def test_pictures_that_come_turn_by_turn_continue_from_a_state() -> None:
    """Text, then a picture behind it, then another: each prompt begins with a snapshot of the one before."""
    own, words = served("qwen3_5"), "some words before any picture, " * 4
    first, second = picture(112, 112, 5), picture(112, 60, 6)
    text = words + PICTURE + "and quite a few more words behind it, " * 4
    turns: list[tuple[str, list[Any]]] = [(words, []), (text, [first]), (text + PICTURE + "and the end", [first, second])]
    own.llm.reset_prefix_cache()
    found = []
    for said, pictures in turns:
        case = {"prompt": said} | ({"multi_modal_data": {"image": pictures}} if pictures else {})
        (output,) = generate(own.llm, case)
        same(output, own.expected(case))
        found.append(output.num_cached_tokens or 0)
    assert found[0] == 0 and found[1] == 64 and found[2] > len(words)
    own.llm.check_integrity()
