"""Attention weights of prompts: equal to transformers', however the prompt is cut, and beside other sequences."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.models import tiny_llama, tiny_models
from transformers import AutoModelForCausalLM

from headrace import LLM, SamplingParams
from headrace.frontend.streams import new_output
from headrace.outputs import RequestOutput
from headrace.pooling_params import PoolingParams

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 19]


@pytest.fixture(scope="module", params=["llama", "gpt_oss"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers attend to all tokens; and one with windows of 7 tokens, and with sinks."""
    folder = tmp_path_factory.mktemp("attention")
    if request.param == "llama":
        return tiny_llama.write_model(folder)
    tiny_models.save(tiny_models.model(request.param), folder)
    tiny_llama.write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    """Seven tokens a step: the prompt is computed in three, beside others."""
    with LLM(str(checkpoint), dtype="float32", num_kv_blocks=64, max_num_seqs=4, max_num_batched_tokens=7) as made:
        yield made
        made.check_integrity()


def watched(llm: LLM, *asked: tuple[int, int | None]) -> list[torch.Tensor]:
    """The weights of PROMPT in layers and heads, computed together and beside a sequence that decodes."""
    core = llm._engine.core
    plain = llm.inputs.request(
        {"prompt_token_ids": PROMPT[:9]}, SamplingParams(max_tokens=12, ignore_eos=True), request_id="plain"
    )
    requests = [plain]
    for index, (layer, head) in enumerate(asked):
        request = llm.inputs.request({"prompt_token_ids": PROMPT}, SamplingParams(), request_id=f"watched-{index}")
        pooling = PoolingParams(method="attention", layer=layer, query_head=head)
        requests.append(msgspec.structs.replace(request, pooling=pooling))
    outputs: dict[str, RequestOutput] = {}
    for request in requests:
        outputs[request.request_id] = new_output(request)
        core.add(request)
    while core.has_work():
        for delta in core.step():
            outputs[delta.request_id].add(delta)
    assert len(outputs.pop("plain").outputs[0].token_ids) == 12
    size = len(PROMPT)
    return [torch.frombuffer(bytearray(one.pooled or b""), dtype=torch.float32).view(size, size) for one in outputs.values()]


def test_weights_are_those_of_transformers(llm: LLM, checkpoint: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager", dtype=torch.float32)
    with torch.inference_mode():
        attentions = model(torch.tensor([PROMPT]), output_attentions=True).attentions
    last = len(attentions) - 1
    one, other, mean = watched(llm, (0, 1), (last, 0), (last, None))
    torch.testing.assert_close(one, attentions[0][0, 1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(other, attentions[last][0, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mean, attentions[last][0].mean(0), rtol=1e-4, atol=1e-5)
    # The prompt is in the prefix cache now; all of its tokens are computed again.
    (again,) = watched(llm, (0, 1))
    torch.testing.assert_close(again, one, rtol=1e-5, atol=1e-6)
    assert torch.equal(one.triu(1), torch.zeros_like(one))
