"""Requests that use every sampling feature."""

from __future__ import annotations

from headrace.core.request import Request
from support.runner.harness import EOS, prompt, request

BAD_WORDS = ["ab", "dcd", "aé", "bbb"]
FEATURES: dict[str, Request] = {
    "greedy": request("greedy", prompt(1, 13)),
    "short": request("short", prompt(2, 1), max_tokens=5),
    "long": request("long", prompt(3, 41), max_tokens=30, ignore_eos=True),
    "drawn": request("drawn", prompt(4, 10), temperature=1.0, seed=3),
    "filtered": request("filtered", prompt(5, 18), temperature=0.8, top_p=0.9, top_k=20, seed=5),
    "nucleus": request("nucleus", prompt(6, 7), temperature=1.2, top_p=0.8, min_p=0.02, seed=-9),
    "penalties": request(
        "penalties", prompt(7, 15), repetition_penalty=4.0, presence_penalty=1.0, frequency_penalty=1.5, max_tokens=40
    ),
    "penalties drawn": request(
        "penalties drawn", prompt(8, 9), repetition_penalty=0.8, frequency_penalty=-0.3, temperature=0.7, seed=1, max_tokens=24
    ),
    "bad words": request("bad words", prompt(9, 12), bad_words=BAD_WORDS, temperature=0.9, max_tokens=24, ignore_eos=True),
    "bad words with special": request(
        "bad words with special", prompt(10, 6), bad_words=["<eos>a", "s>b"], skip_special_tokens=False, ignore_eos=True
    ),
    "min tokens": request(
        "min tokens", prompt(11, 8), min_tokens=9, max_tokens=20, logit_bias={EOS: 30.0}, stop_token_ids=[50, 51]
    ),
    "bias": request("bias", prompt(12, 5), logit_bias={9: 6.0, 10: 6.5, 3: -100.0}, temperature=1.0),
    "allowed": request("allowed", prompt(13, 11), allowed_token_ids=[EOS, 20, 30, 40, 44], temperature=1.5, max_tokens=16),
    "logprobs": request("logprobs", prompt(14, 9), logprobs=3, repetition_penalty=1.2),
    "processed logprobs": request(
        "processed logprobs",
        prompt(15, 9),
        logprobs=5,
        logprobs_mode="processed",
        temperature=0.7,
        top_k=4,
        logit_bias={5: 2.0},
    ),
    "prompt logprobs": request("prompt logprobs", prompt(16, 27), prompt_logprobs=2, logprobs=0, temperature=1.0),
    "samples": request("samples", prompt(17, 22), n=3, temperature=1.1, top_p=0.95, seed=11, frequency_penalty=0.2),
}
