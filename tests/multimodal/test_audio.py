"""Prompts with features of audio get what transformers computes for them; raw audio is refused by name."""

from __future__ import annotations

import base64
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from support.models import tiny_vision
from support.models.architectures import quiet
from support.served_pictures import STEPS, Served, engine, generate, same, served
from support.vision_reference import BYTES, Reference

from headrace import LLM, SamplingParams
from headrace.config import EngineArgs
from headrace.errors import ConfigError, RequestError
from headrace.frontend.features import FeatureEncoder
from headrace.multimodal.items import MultiModalData

KIND, MARK, HIDDEN = "qwen2_audio", "<|AUDIO|>", 64
RAW = "audio is taken as features alone"


def sound(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(100 * rows + seed))


def asked(text: str, *clips: torch.Tensor) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"audio": [{"features": clip} for clip in clips]}}


CASES = {
    "one": asked(f"what is {MARK} to you?", sound(5)),
    "first and last": asked(MARK, sound(23)),
    "two": asked(f"{MARK}, or {MARK}?", sound(3), sound(40)),
    "beside": asked(f"a{MARK}{MARK}b", sound(7), sound(1)),
    "same twice": asked(f"{MARK} and {MARK}", sound(9), sound(9)),
}


@pytest.fixture(scope="module")
def own() -> Served:
    return served(KIND)


@torch.no_grad()
def expected(own: Served, prompt: dict[str, Any]) -> Reference:
    """Greedy generation of transformers' model, whose input embeddings have the features at the placeholders."""
    token = tiny_vision.IDS[MARK]
    before, *rest = prompt["prompt"].split(MARK)
    clips = [clip["features"] for clip in prompt["multi_modal_data"]["audio"]]
    ids = list(before.encode())
    for clip, text in zip(clips, rest, strict=True):
        ids += [token] * len(clip) + list(text.encode())
    found = Reference([], [])
    for _ in range(STEPS):
        given = torch.tensor([ids])
        embeds = own.theirs.get_input_embeddings()(given).clone()
        embeds[given == token] = torch.cat(clips)
        scores = own.theirs(inputs_embeds=embeds, use_cache=False).logits[0, -1].log_softmax(-1)
        ids.append(int(scores[:BYTES].argmax()))
        found.token_ids.append(ids[-1])
        found.logprobs.append(float(scores[ids[-1]]))
    return found


def refused(llm: LLM, audio: Any, param: str = "multi_modal_data.audio[0]", text: str = MARK) -> str:
    with pytest.raises(RequestError) as error:
        generate(llm, {"prompt": text, "multi_modal_data": {"audio": audio}})
    assert error.value.param == param
    return error.value.message


@pytest.mark.parametrize("name", list(CASES))
def test_a_prompt_alone_equals_transformers(own: Served, name: str) -> None:
    own.llm.reset_prefix_cache()
    (output,) = generate(own.llm, CASES[name])
    same(output, expected(own, CASES[name]))
    clips = CASES[name]["multi_modal_data"]["audio"]
    count = sum(len(clip["features"]) for clip in clips)
    assert (output.prompt_token_ids or []).count(tiny_vision.IDS[MARK]) == count


def test_chunks_that_cut_clips_in_company_equal_transformers(own: Served) -> None:
    llm = engine(own.folder, max_num_batched_tokens=8)
    outputs = generate(llm, *CASES.values(), "text alone")
    for prompt, output in zip(CASES.values(), outputs, strict=False):
        same(output, expected(own, prompt))
    (alone,) = generate(own.llm, "text alone")
    assert outputs[-1].outputs[0].token_ids == alone.outputs[0].token_ids
    llm.check_integrity()


def test_preempted_prompts_bring_their_clips_again(own: Served) -> None:
    prompts = [asked(f"{MARK} {index}", sound(30, index)) for index in range(4)]
    llm = engine(own.folder, num_kv_blocks=36, block_size=4, max_model_len=64, max_num_batched_tokens=16)
    outputs = generate(llm, *prompts, max_tokens=24)
    assert llm.stats.num_preemptions
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids[:STEPS] == expected(own, prompt).token_ids
        (alone,) = generate(own.llm, prompt, max_tokens=24)
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
    llm.check_integrity()


def test_a_cached_prefix_covers_equal_clips_alone(own: Served) -> None:
    text = f"some words before this sound, and more of them {MARK} and quite a few more words behind it"
    one, other = asked(text, sound(40, 1)), asked(text, sound(40, 2))
    own.llm.reset_prefix_cache()
    first, second, third = (generate(own.llm, each)[0] for each in (one, one, other))
    length = len(first.prompt_token_ids or [])
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, (length - 1) // 16 * 16)
    assert third.num_cached_tokens == text.index(MARK) // 16 * 16 > 0
    for output, prompt in ((first, one), (second, one), (third, other)):
        same(output, expected(own, prompt))
    assert first.outputs[0].token_ids != third.outputs[0].token_ids


def test_every_way_to_give_features_is_the_same(own: Served) -> None:
    """Features are given as an object, in a conversation as an object or as safetensors, and at a URL."""
    clip = sound(12)
    file = base64.b64encode(save({"features": clip})).decode()
    url = f"data:application/octet-stream;base64,{file}"
    text = f"[user]{MARK}what?[assistant]"
    own.llm.reset_prefix_cache()
    (plain,) = generate(own.llm, {"prompt": text, "multi_modal_data": {"audio": {"features": clip.numpy()}}})
    own.llm.reset_prefix_cache()
    (at_url,) = generate(own.llm, {"prompt": text, "multi_modal_data": {"audio_feature_urls": url}})
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, allowed_token_ids=list(range(BYTES)))
    parts: list[dict[str, Any]] = [
        {"type": "audio", "audio": {"features": clip}},
        {"type": "audio_embeds", "audio_embeds": {"data": file}},
        {"type": "audio_embeds", "audio_embeds": {"url": url}},
    ]
    for part in parts:
        (said,) = own.llm.chat([{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}], params)
        assert said.outputs[0].token_ids == plain.outputs[0].token_ids
    assert at_url.outputs[0].logprobs == plain.outputs[0].logprobs
    same(plain, expected(own, asked(text, clip)))


def test_features_of_other_dtypes_are_taken(own: Served) -> None:
    clip = sound(6).bfloat16()
    (output,) = generate(own.llm, asked(f"{MARK}?", clip))
    same(output, expected(own, asked(f"{MARK}?", clip.float())))


@pytest.mark.parametrize(
    "raw",
    [
        np.zeros(1600, np.float32),
        torch.zeros(4, HIDDEN),
        (np.zeros(1600, np.float32), 16000),
        {"array": np.zeros(1600, np.float32), "sampling_rate": 16000},
        "https://sounds.example.com/a.wav",
        b"RIFF",
        [[{"features": sound(2)}]],
    ],
)
def test_raw_audio_is_refused_by_name(own: Served, raw: Any) -> None:
    assert RAW in refused(own.llm, raw)
    with pytest.raises(RequestError, match=RAW) as error:
        own.llm.chat([{"role": "user", "content": [{"type": "audio", "audio": raw}]}])
    assert error.value.param == "messages[0].content[0].audio"


@pytest.mark.parametrize("kind", ["input_audio", "audio_url"])
def test_raw_audio_of_a_conversation_is_refused_by_name(own: Served, kind: str) -> None:
    part = {"type": kind, kind: {"data": "UklGRg==", "format": "wav", "url": "https://sounds.example.com/a.wav"}}
    with pytest.raises(RequestError, match=rf"{kind} is not supported: {RAW}, audio_embeds") as error:
        own.llm.chat([{"role": "user", "content": [part]}])
    assert error.value.param == "messages[0].content[0].type"


@pytest.mark.parametrize(
    ("audio", "part", "message"),
    [
        ({"features": torch.zeros(4, 63)}, ".features", "expected hidden size 64, not 63"),
        ({"features": torch.full((4, HIDDEN), torch.nan)}, ".features", "expected numbers that are finite in float32"),
        ({"features": torch.zeros(4, HIDDEN).int()}, ".features", "has dtype int32"),
        ({"features": torch.zeros(HIDDEN)}, ".features", "expected 2 dimensions"),
        ({"features": torch.zeros(0, HIDDEN)}, ".features", "has no rows"),
        ({"features": torch.zeros(4, HIDDEN), "grid_thw": [[1, 2, 2]]}, "", "has no part named 'grid_thw'"),
        ({"features": torch.zeros(600, HIDDEN)}, "", "would take 600 tokens, and the context has 512"),
    ],
)
def test_features_that_do_not_fit_are_refused(own: Served, audio: Any, part: str, message: str) -> None:
    assert message in refused(own.llm, audio, f"multi_modal_data.audio[0]{part}")


def test_clips_and_placeholders_are_counted(own: Served) -> None:
    one = {"features": sound(2)}
    every = "multi_modal_data.audio"
    assert "has 2 placeholders <|AUDIO|> for 1 audio clips" in refused(own.llm, one, every, MARK * 2)
    assert "has 1 placeholders <|AUDIO|> for 2 audio clips" in refused(own.llm, [one, one], every)
    assert "has 33 audio clips; this engine takes at most 32" in refused(own.llm, [one] * 33, every, MARK * 33)
    with pytest.raises(RequestError, match=r"stands for audio content, and no multi_modal_data.audio"):
        generate(own.llm, f"a{MARK}")
    few = engine(own.folder, limit_mm_per_prompt={"audio": 0})
    assert "takes at most 0 (limit_mm_per_prompt)" in refused(few, one, every)


def test_a_model_takes_the_media_that_it_reads(own: Served) -> None:
    with pytest.raises(RequestError, match="the model takes no images: the processor of qwen2_audio reads none"):
        generate(own.llm, {"prompt": "a", "multi_modal_data": {"image": np.zeros((28, 28, 3), np.uint8)}})
    message = refused(served("qwen2_5_vl").llm, {"features": sound(2)}, "multi_modal_data.audio")
    assert message == "the model takes no audio clips: the processor of qwen2_5_vl reads none"
    with quiet():
        foreign = engine(own.folder, model_impl="transformers")
    with pytest.raises(RequestError, match="audio clips of qwen2_audio are for its native implementation"):
        generate(foreign, CASES["one"])


def test_the_report_says_that_nothing_is_encoded_here(own: Served) -> None:
    decisions = {line.name: (line.value, line.reason) for line in own.llm.info.decisions}
    assert decisions["vision encoder"] == ("none", "audio clips of qwen2_audio are taken as features alone")
    assert "image processor" not in decisions
    with pytest.raises(ConfigError, match="audio clips of qwen2_audio are not encoded here"):
        FeatureEncoder(EngineArgs(model=str(own.folder)))


def test_checkpoints_with_the_modules_names_are_read(own: Served, tmp_path: Path) -> None:
    shutil.copytree(own.folder, tmp_path, dirs_exist_ok=True)
    state = {name: tensor.contiguous().clone() for name, tensor in own.theirs.state_dict().items()}
    assert any(name.startswith("model.audio_tower.") for name in state)
    save_file(state, tmp_path / "model.safetensors")
    (output,) = generate(engine(tmp_path), CASES["two"])
    same(output, expected(own, CASES["two"]))


def test_weights_that_nothing_loads_are_an_error(own: Served, tmp_path: Path) -> None:
    shutil.copytree(own.folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), "vision_tower.weight": torch.zeros(2)}, path)
    with pytest.raises(ConfigError, match=r"vision_tower\.weight"):
        engine(tmp_path)


def test_features_objects_are_taken_as_they_are(own: Served) -> None:
    data = MultiModalData.of({"audio": {"features": sound(5)}})
    assert [modality for modality, _ in data.items()] == ["audio"]
    (output,) = generate(own.llm, {"prompt": CASES["one"]["prompt"], "multi_modal_data": data})
    same(output, expected(own, CASES["one"]))
