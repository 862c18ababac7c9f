"""Messages between processes are checked where they are made, and trusted where they arrive."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config import EngineArgs
from headrace.core.request import Request
from headrace.processes.messages import AddRequest, Start, decode_to_engine, encode
from headrace.sampling_params import SamplingParams, StructuredOutputsParams

ARGS = EngineArgs(model="model", structured_outputs_config={"max_depth": 3}, limit_mm_per_prompt={"image": 2})
SAMPLING = SamplingParams(
    temperature=0.5, stop=["a"], logit_bias={3: 1.0}, structured_outputs=StructuredOutputsParams(json={"type": "object"})
)
REQUEST = Request(request_id="a", prompt_token_ids=[1], sampling=SAMPLING, max_tokens=3, seed=1)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    def validate(self: object) -> None:
        pytest.fail(f"a {type(self).__name__} was checked again")

    for cls in (SamplingParams, StructuredOutputsParams, EngineArgs):
        monkeypatch.setattr(cls, "validate", validate)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("message", [AddRequest(REQUEST), Start(ARGS, 20, 0.0, 3)], ids=["request", "arguments"])
def test_a_message_is_not_checked_where_it_arrives(message: Any) -> None:
    assert decode_to_engine(encode(message)) == message
