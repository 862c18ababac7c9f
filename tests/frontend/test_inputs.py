"""Prompts and parameters to requests: what is accepted, what is refused, and by which name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.models.tiny_llama import CONTEXT, EOS, VOCAB
from transformers import PretrainedConfig

from headrace.config import EngineArgs
from headrace.errors import ConfigError, RequestError
from headrace.frontend.inputs import InputProcessor
from headrace.frontend.prepare import input_processor
from headrace.kv import CacheIdentity
from headrace.multimodal.media_tokens import configured_media_tokens
from headrace.sampling_params import SamplingParams
from headrace.startup.text import ModelText


@pytest.fixture(scope="module")
def inputs(text: ModelText) -> InputProcessor:
    return input_processor(text, EngineArgs(max_logprobs=5), vocab_size=VOCAB, max_model_len=CONTEXT)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_the_servers_mode_of_logprobs_is_for_requests_that_have_none(text: ModelText, mode: Any) -> None:
    processor = input_processor(text, EngineArgs(logprobs_mode=mode), vocab_size=VOCAB, max_model_len=CONTEXT)

    def resolved(**fields: Any) -> str | None:
        return processor.request("a", SamplingParams(**fields), request_id="r").sampling.logprobs_mode

    processed = mode == "processed_logprobs"
    assert resolved(logprobs=0) == ("processed" if processed else None)
    assert (resolved(logprobs=0, logprobs_mode="raw"), resolved(logprobs=0, logprobs_mode="processed")) == ("raw", "processed")
    assert resolved() is None


def test_requests_without_a_seed_have_seeds_of_their_own(text: ModelText) -> None:
    """One processor makes the requests of all replicas, so that none repeats another's samples."""
    processor = input_processor(text, EngineArgs(), vocab_size=VOCAB, max_model_len=CONTEXT)
    seeds = [processor.request("a", SamplingParams(), request_id=name).seed for name in "abc"]
    assert len({*seeds}) == 3
    seed = 2**63 - 1
    assert processor.request("a", SamplingParams(seed=seed), request_id="d").seed == seed


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_logits_are_not_reported(mode: Any) -> None:
    with pytest.raises(ConfigError, match="whose differences are those of the logits"):
        EngineArgs(logprobs_mode=mode)


@pytest.fixture(scope="module")
def bare() -> InputProcessor:
    """Without a tokenizer."""
    return InputProcessor(
        EngineArgs(),
        vocab_size=VOCAB,
        max_model_len=CONTEXT,
        tokenizer=None,
        generation_config={"eos_token_id": [3], "temperature": 0.5, "top_k": 7},
    )


def make(inputs: InputProcessor, prompt: Any = "hello", request_id: Any = "r", options: dict | None = None, **params: Any):
    return inputs.request(prompt, SamplingParams(**params), request_id=request_id, **(options or {}))


def test_a_string_and_its_tokens(inputs: InputProcessor) -> None:
    request = make(inputs)
    assert (request.prompt, request.prompt_token_ids) == ("hello", list(b"hello"))
    assert request.max_tokens == CONTEXT - 5 and request.eos_token_ids == [EOS]
    tokens = make(inputs, {"prompt_token_ids": [1, 2]})
    assert (tokens.prompt, tokens.prompt_token_ids) == (None, [1, 2])
    both = make(inputs, {"prompt_token_ids": [1, 2], "prompt": "x"})
    assert (both.prompt, both.prompt_token_ids) == ("x", [1, 2])


def test_no_media_are_none_and_others_are_refused(inputs: InputProcessor) -> None:
    for none in (None, {}):
        assert make(inputs, {"prompt": "hello", "multi_modal_data": none}).prompt_token_ids == list(b"hello")
    for other in ([], np.zeros(3), "", {"image": []}):
        with pytest.raises(RequestError, match="this engine reads text alone") as caught:
            make(inputs, {"prompt": "hello", "multi_modal_data": other})
        assert caught.value.param == "multi_modal_data"


def test_tokens_that_a_configuration_names_for_media_are_refused(inputs: InputProcessor) -> None:
    """Whether the model's pictures and sounds are read here or not."""
    config = PretrainedConfig(image_token_index=7, video_token_id=None, audio_token_id=9, vision_start_token_id=8)
    tokens = configured_media_tokens(config)
    assert tokens == {7: "image", 9: "audio"}
    inputs = InputProcessor(
        EngineArgs(), vocab_size=300, max_model_len=CONTEXT, tokenizer=None, generation_config={}, media_tokens=tokens
    )
    assert make(inputs, {"prompt_token_ids": [6, 8]}).prompt_token_ids == [6, 8]
    for token, modality in tokens.items():
        with pytest.raises(
            RequestError, match=f"^the prompt has the token {token}, which stands for {modality} content, and no "
        ):
            make(inputs, {"prompt_token_ids": [6, token]})


def test_long_stop_strings_of_many_tokens_are_taken(inputs: InputProcessor) -> None:
    assert make(inputs, stop=["🙂" * 1024]).sampling.stop == ["🙂" * 1024]


def test_texts_too_long_to_tokenise_are_refused_before(text: ModelText, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = input_processor(text, EngineArgs(max_prompt_chars=10), vocab_size=VOCAB, max_model_len=CONTEXT)
    assert make(inputs, "x" * 10).prompt_token_ids
    monkeypatch.setattr(inputs.tokenizer, "encode", None)
    with pytest.raises(RequestError, match="max_prompt_chars") as caught:
        make(inputs, "x" * 11)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


def test_the_prompt_and_its_output_fill_the_context_exactly(inputs: InputProcessor) -> None:
    assert make(inputs, "x" * (CONTEXT - 1)).max_tokens == 1
    assert make(inputs, "x" * 250, max_tokens=6).max_tokens == 6


@pytest.mark.parametrize(
    ("prompt", "sampling", "limit"),
    [("abc", {}, 20), ("abc", {"max_tokens": 50}, 50), ("x" * 250, {}, CONTEXT - 250), ("abc", {"min_tokens": 30}, 30)],
)
def test_a_default_limit_is_for_outputs_without_one(
    inputs: InputProcessor, prompt: str, sampling: dict[str, Any], limit: int
) -> None:
    assert inputs.request(prompt, SamplingParams(**sampling), request_id="r", default_max_tokens=20).max_tokens == limit


REFUSED: list[tuple[Any, dict, str]] = [
    ("", {}, "prompt"),
    (None, {}, "prompt"),
    ([1, 2], {}, "prompt"),
    ({}, {}, "prompt"),
    ({"prompt": 3}, {}, "prompt"),
    ({"text": "x"}, {}, "prompt"),
    ({"prompt_token_ids": "x"}, {}, "prompt_token_ids"),
    ({"prompt_token_ids": [1, True]}, {}, "prompt_token_ids"),
    ({"prompt_token_ids": [1.0]}, {}, "prompt_token_ids"),
    ({"prompt_token_ids": []}, {}, "prompt"),
    ({"prompt_token_ids": [VOCAB]}, {}, "prompt"),
    ({"prompt_token_ids": [-1]}, {}, "prompt"),
    ({"prompt_token_ids": [10**30]}, {}, "prompt"),
    ("x" * CONTEXT, {}, "prompt"),
    ("x" * 10_000_000, {}, "prompt"),
    ("\ud800", {}, "prompt"),
    ("x" * 250, {"max_tokens": 7}, "max_tokens"),
    ("x" * 250, {"min_tokens": 7}, "min_tokens"),
    ("x", {"n": 129}, "n"),
    ("x", {"logprobs": 6}, "logprobs"),
    ("x", {"logprobs": -1}, "logprobs"),
    ("x", {"prompt_logprobs": 6}, "prompt_logprobs"),
    ("x", {"allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
    ("x", {"stop_token_ids": [1, VOCAB]}, "stop_token_ids"),
    ("x", {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
    ("x", {"stop": ["a"] * 17}, "stop"),
    ("x", {"stop": ["a" * 1025]}, "stop"),
    ("x", {"stop": ["a" * 10_000_000]}, "stop"),
    ("x", {"stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ("x", {"allowed_token_ids": [1] * 65_537}, "allowed_token_ids"),
    ("x", {"stop": ["\udc00"]}, "stop"),
    ("x", {"bad_words": ["a"] * 17}, "bad_words"),
    ("x", {"bad_words": ["a" * 9]}, "bad_words"),
]


@pytest.mark.parametrize(("prompt", "params", "param"), REFUSED, ids=[f"{i}-{row[2]}" for i, row in enumerate(REFUSED)])
def test_refusals_name_the_parameter(inputs: InputProcessor, prompt: Any, params: dict, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        make(inputs, prompt, **params)
    assert caught.value.param == param and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"priority": 2**63}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 3}, "cache_salt"),
    ],
)
def test_options_are_checked(inputs: InputProcessor, options: dict, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        make(inputs, options=options)
    assert caught.value.param == param


@pytest.mark.parametrize("request_id", ["", "x" * 300, None, 3, "\ud800"])
def test_request_ids_are_checked(inputs: InputProcessor, request_id: Any) -> None:
    with pytest.raises(RequestError) as caught:
        make(inputs, request_id=request_id)
    assert caught.value.param == "request_id"


def test_everything_that_is_asked_for_is_in_the_request(inputs: InputProcessor) -> None:
    request = make(inputs, options={"priority": -3, "cache_salt": "s"}, seed=7, bad_words=["no"])
    assert (request.priority, request.cache_salt, request.seed) == (-3, "s", 7)
    assert request.cache_identity == CacheIdentity(cache_salt="s")
    assert request.bad_words is not None and not request.bad_words.special_text
    shown = make(inputs, bad_words=["no"], skip_special_tokens=False).bad_words
    assert shown is not None and shown.special_text
    assert make(inputs, bad_words=["no"]).bad_words is request.bad_words, "compiled once"
    assert request.arrival_time > 0


def test_unseeded_requests_draw_their_seeds_from_the_engine_s(text: ModelText) -> None:
    def seeds(seed: int) -> list[int]:
        inputs = input_processor(text, EngineArgs(seed=seed), vocab_size=VOCAB, max_model_len=CONTEXT)
        return [make(inputs).seed for _ in range(3)]

    assert seeds(1) == seeds(1) != seeds(2)
    assert len(set(seeds(1))) == 3


def test_text_without_a_tokenizer_is_refused_by_name(bare: InputProcessor) -> None:
    tokens = {"prompt_token_ids": [1]}
    assert make(bare, tokens, stop_token_ids=[2], logprobs=3).eos_token_ids == [3]
    for prompt, params, param in [
        ("x", {}, "prompt"),
        (tokens, {"stop": ["x"]}, "stop"),
        (tokens, {"bad_words": ["x"]}, "bad_words"),
    ]:
        with pytest.raises(RequestError, match="tokenizer") as caught:
            make(bare, prompt, **params)
        assert caught.value.param == param


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "repetition_penalty"])
def test_the_model_s_own_defaults_have_the_ranges_of_requests(name: str) -> None:
    def defaults(value: float) -> SamplingParams:
        return InputProcessor(
            EngineArgs(),
            vocab_size=3,
            max_model_len=3,
            tokenizer=None,
            generation_config={name: value, "eos_token_id": [1, 2**70]},
        ).default_sampling

    for value in (1e300, 3.5e38, 1e-40, 5e-324, -0.0, -1.0, 0, 1, 2**31, 2**63, 10**30, 10**400):
        try:
            wanted = SamplingParams(**{name: value})
        except RequestError:
            with pytest.raises(ConfigError, match=r"generation_config\.json"):
                defaults(value)
        else:
            assert defaults(value) == wanted


def test_the_model_s_own_defaults(bare: InputProcessor) -> None:
    assert bare.default_sampling == SamplingParams(temperature=0.5, top_k=7)
    with pytest.raises(ConfigError, match="temperature"):
        InputProcessor(
            EngineArgs(),
            vocab_size=3,
            max_model_len=3,
            tokenizer=None,
            generation_config={"temperature": -1},
        )


@pytest.mark.parametrize("variable", ["HEADRACE_MAX_BAD_WORDS_NUM", "HEADRACE_STOP_SEQS_MAX_LEN"])
def test_an_environment_variable_that_is_no_number_is_named(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "many")
    with pytest.raises(ConfigError, match=f"{variable} must be a whole number, not 'many'"):
        EngineArgs()
    monkeypatch.setenv(variable, "")
    assert EngineArgs().max_stop_seqs_num == 16


def test_limits_follow_their_environment_variables(text: ModelText, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = {
        "HEADRACE_MAX_BAD_WORDS_NUM": {"bad_words": ["a", "b"]},
        "HEADRACE_BAD_WORDS_MAX_LEN": {"bad_words": ["ab"]},
        "HEADRACE_MAX_STOP_SEQS_NUM": {"stop": ["a", "b"]},
        "HEADRACE_STOP_SEQS_MAX_LEN": {"stop": ["ab"]},
    }
    for variable, params in tries.items():
        with monkeypatch.context() as patch:
            make(input_processor(text, EngineArgs(), vocab_size=VOCAB, max_model_len=CONTEXT), **params)
            patch.setenv(variable, "1")
            with pytest.raises(RequestError):
                make(input_processor(text, EngineArgs(), vocab_size=VOCAB, max_model_len=CONTEXT), **params)
