"""Videos of models that see frames as pictures: which frames, what the prompt says of them, and what is refused."""

from __future__ import annotations

import datetime
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers
import transformers.video_utils
from support.models import tiny_vision
from support.served_pictures import video

from headrace.errors import RequestError
from headrace.multimodal.families import media_rules
from headrace.multimodal.idefics3 import _Sampling, in_words
from headrace.multimodal.items import MultiModalData, Video, array_of
from headrace.text.content import ConversationMedia

from .processing import HIDDEN, prepare, processor, theirs


@pytest.mark.parametrize(
    ("metadata", "options", "length"),
    [
        ({"fps": 2.0}, {}, 1),
        ({"fps": 0.5, "duration": 4000.7}, {}, 4000),
        ({"fps": 0.01}, {"num_frames": 3}, 300),
        ({}, {"do_sample_frames": True}, 0),
        ({"fps": 2.0, "frames_indices": [3, 5, 9, 11], "total_num_frames": 20}, {}, 5),
    ],
)
def test_the_text_of_frames_is_that_of_transformers(
    tmp_path: Path, metadata: dict[str, Any], options: dict[str, Any], length: int
) -> None:
    made = processor(tmp_path, "smolvlm", sectioned_rope=False, max_model_len=2048)
    (found,) = made._rules.process(Video(video(4)[0], metadata), options, "video")
    indices = metadata.get("frames_indices") or ([0, 1, 3] if "num_frames" in options else list(range(4)))
    fps = metadata.get("fps", 24.0)
    times = [index / fps for index in indices]
    given = SimpleNamespace(fps=fps, duration=metadata.get("duration"), timestamps=times)
    inputs = {"pixel_values": np.zeros((1, len(indices))), "video_metadata": [given]}
    them = SimpleNamespace(
        image_seq_len=4, image_token="<image>", fake_image_token="<fake_token_around_image>", global_image_token="<global-img>"
    )
    space = {"num2words": in_words, "timedelta": datetime.timedelta}
    expected = theirs("smolvlm/processing_smolvlm", "replace_video_token", space)(them, inputs, 0)
    text = "".join(piece if isinstance(piece, str) else "<image>" * piece for piece in found.expansion.pieces)
    assert text == expected and f" {datetime.timedelta(seconds=length)} [H:MM:SS]" in text
    assert array_of(found.tensors["pixel_values"]).shape == (1, len(indices), 3, 56, 56)


@pytest.mark.parametrize("rate", [0.4, 1.0, 7.0])
@pytest.mark.parametrize("most", [1, 5, 64])
def test_frames_are_sampled_as_by_transformers(rate: float, most: int) -> None:
    sample = theirs("smolvlm/video_processing_smolvlm", "sample_frames", {"np": np, "VideoMetadata": object, "torch": None})
    usual = _Sampling(True, 1.0, 64, 1, 1 << 16, together=True)
    for total, fps in ((1, 24.0), (30, 24.0), (90, 24.0), (200, 3.0), (400, 1.0)):
        metadata = transformers.video_utils.VideoMetadata(total_num_frames=total, fps=fps, duration=total / fps)
        expected = sample(SimpleNamespace(num_frames=64, fps=1.0), metadata, most, rate)
        frames = np.arange(total, dtype=np.uint32)[:, None, None, None].repeat(3, axis=3)
        found = usual(Video(frames, {"fps": fps}), {"fps": rate, "num_frames": most}, "video")
        assert found.indices.tolist() == expected.tolist() == found.frames[:, 0, 0, 0].tolist()
    assert usual(Video(frames, {"do_sample_frames": False}), {}, "video").indices.tolist() == list(range(400))


def test_numbers_in_words() -> None:
    known = {0: "zero", 13: "thirteen", 20: "twenty", 64: "sixty-four", 100: "one hundred", 101: "one hundred and one"}
    known |= {340: "three hundred and forty", 999: "nine hundred and ninety-nine", 1000: "one thousand"}
    known |= {1001: "one thousand and one", 2345: "two thousand, three hundred and forty-five"}
    assert {number: in_words(number) for number in known} == known
    if importlib.util.find_spec("num2words"):
        num2words = importlib.import_module("num2words").num2words
        assert all(in_words(number) == num2words(number) for number in [*range(0, 3000, 7), *range(1 << 16, 10**6, 9973)])


@pytest.mark.parametrize("kind", ["idefics3", "gemma3", "llava", "mistral3"])
def test_models_without_videos_refuse_them_by_name(tmp_path: Path, kind: str) -> None:
    made = processor(tmp_path, kind, sectioned_rope=False)
    why = f"the model takes no videos: the processor of {made._facts.model_type} reads none"
    clip = {"features": np.ones((4, HIDDEN), np.float32), "grid_thw": [[1, 1, 1]], "second_per_grid": [1.0]}
    for data in ({"video": video(4)}, {"video_embeds": clip}):
        with pytest.raises(RequestError, match=why) as caught:
            prepare(made, "x", data)
        assert caught.value.param == "multi_modal_data.video"
    with pytest.raises(RequestError, match=why) as caught:
        made.check_features(MultiModalData.of({"video_embeds": clip}).videos[0], "video", "data")
    assert caught.value.param == "data"


def test_a_tokenizer_may_lack_videos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of models that learned to read them later; SmolVLM's prompts spell them without a token."""
    monkeypatch.setattr(tiny_vision, "SPECIAL", [token for token in tiny_vision.SPECIAL if token != "<video>"])
    made = processor(tmp_path / "internvl", "internvl", sectioned_rope=False)
    with pytest.raises(RequestError, match="takes no videos: its tokenizer has no <video>"):
        prepare(made, "<video>", {"video": video(2)})
    made = processor(tmp_path / "smolvlm", "smolvlm", sectioned_rope=False, max_model_len=2048)
    found = prepare(made, "<video>", {"video": video(2)})
    assert found.token_ids.count(tiny_vision.IDS["<image>"]) == 8 and made.written == {"video": "<video>"}
    with pytest.raises(RequestError, match="0 placeholders <video> for 1 videos"):
        prepare(made, [5, 6], {"video": video(2)})


@pytest.mark.parametrize(
    ("given", "name", "what"),
    [
        ({"grid_thw": [[2, 1, 2]]}, "grid_thw", r"expected \[frames, 1, 1\], not \[2, 1, 2\]"),
        ({"second_per_grid": None}, "second_per_grid", "is missing"),
        ({"grid_thw": [[3, 1, 1]]}, "features", r"expected 12 rows for the grid \[3, 1, 1\], not 8"),
    ],
)
def test_features_of_frames_are_checked(tmp_path: Path, given: dict[str, Any], name: str, what: str) -> None:
    made = processor(tmp_path, "smolvlm", sectioned_rope=False, max_model_len=2048)
    clip = {"features": np.ones((8, HIDDEN), np.float32), "grid_thw": [[2, 1, 1]], "second_per_grid": [0.5]}
    found = prepare(made, "<video>", {"video_embeds": clip})
    assert found.media[0].runs[1][1] == 4
    changed = {key: value for key, value in (clip | given).items() if value is not None}
    with pytest.raises(RequestError, match=what) as caught:
        prepare(made, "<video>", {"video_embeds": changed})
    assert caught.value.param == f"multi_modal_data.video_embeds[0].{name}"


@pytest.mark.parametrize(
    "settings", [{}, {"size": None, "video_sampling": {"fps": 1, "max_frames": 9, "video_size": {"longest_edge": 80}}}]
)
def test_frames_are_resized_as_by_transformers(tmp_path: Path, settings: dict[str, Any]) -> None:
    pytest.importorskip("torchvision")
    processor(tmp_path, "smolvlm")
    file = tmp_path / "preprocessor_config.json"
    fields = json.loads(file.read_text()) | {"image_mean": [0.5, 0.4, 0.3]} | settings
    file.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    rules = media_rules("smolvlm", tmp_path, transformers.AutoConfig.from_pretrained(tmp_path))
    theirs = transformers.AutoVideoProcessor.from_pretrained(tmp_path, video_processor_type="SmolVLMVideoProcessor")
    for height, width in ((60, 90), (90, 60), (57, 200), (5, 7)):
        frames, _ = video(3, width, height)
        (found,) = rules.process(Video(frames, {"fps": 2.0}), {}, "video")
        expected = theirs(videos=[frames], return_tensors="pt")["pixel_values"].numpy()
        assert (array_of(found.tensors["pixel_values"]) == expected).all()


def test_a_conversation_reads_as_by_the_template_of_transformers(tmp_path: Path) -> None:
    """transformers replaces the checkpoint's template where there is a video; writing its placeholder as text is enough."""
    made = processor(tmp_path, "smolvlm", sectioned_rope=False)
    space: dict[str, Any] = {}
    theirs("smolvlm/processing_smolvlm", "replace_video_token", space)
    whole = space["DEFAULT_CHAT_TEMPLATE"]
    own = whole.replace("{% elif line['type'] == 'video' %}{{ '<video>' }}", "")
    assert "<video>" not in own
    text, clip = {"type": "text", "text": "what?"}, {"type": "video", "video": video(2)}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for parts in ([clip, text], [text, clip], [picture, clip, text], [clip, clip, text, picture]):
        messages = [{"role": "user", "content": parts}]
        made._tokenizer.hf.chat_template = whole
        expected = made._tokenizer.render_chat(messages, media=ConversationMedia(made.neutral))
        made._tokenizer.hf.chat_template = own
        media = ConversationMedia(made.neutral, made.written)
        assert made._tokenizer.render_chat(messages, media=media) == expected
        assert expected.count("<video>") == parts.count(clip) == [part.modality for part in media.parts].count("video")
