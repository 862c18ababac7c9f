"""Requests of a list of prompts: in order, with media that threads process ahead of them."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.errors import RequestError
from headrace.frontend.pending import PendingRequests
from headrace.multimodal.threads import media_workers, use_one_core


class Inputs:
    """Prompts above 9 have media, whose futures the test completes."""

    media_ahead = 3

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.futures: dict[int, Future[Any]] = {}

    def prepare_media(self, prompt: Any) -> Future[Any] | None:
        self.asked.append(prompt)
        return self.futures.setdefault(prompt, Future()) if prompt > 9 else None


def pending(prompts: list[int], most: int = 9) -> tuple[PendingRequests, Inputs]:
    inputs: Any = Inputs()

    def make(index: int, media: Any) -> Any:
        return SimpleNamespace(request_id=str(index), prompt=prompts[index], media=media)

    return PendingRequests(prompts, inputs, make, most), inputs


def taken(requests: PendingRequests) -> list[int]:
    found = []
    while requests and (request := requests.first(wait=False)) is not None:
        found.append(request.prompt)
        requests.pop()
    return found


def test_requests_come_in_order_once_their_media_are_ready() -> None:
    requests, inputs = pending([1, 20, 2, 21, 22, 3])
    assert taken(requests) == [1] and len(requests) == 5
    assert inputs.asked == [1, 20, 2, 21], "three ahead of the first"
    inputs.futures[21].set_result("b")
    assert taken(requests) == [], "the one before is not ready"
    inputs.futures[20].set_result("a")
    assert taken(requests) == [20, 2, 21]
    threading.Timer(0.01, inputs.futures[22].set_result, ["c"]).start()
    request = requests.first(wait=True)
    assert request is not None and request.media == "c"
    assert taken(requests) == [22, 3] and not requests


def test_the_engine_has_so_many_requests_with_media() -> None:
    requests, inputs = pending([20, 21, 22], most=2)
    for number in (20, 21):
        inputs.prepare_media(number).set_result("x")
    inputs.prepare_media(22).set_result("x")
    assert taken(requests) == [20, 21]
    requests.ended("1")
    assert taken(requests) == [22]


def test_a_wrong_prompt_is_an_error_in_its_turn() -> None:
    requests, inputs = pending([20, 21])
    requests.first(wait=False)
    inputs.futures[20].set_exception(RequestError("no picture", "multi_modal_data"))
    with pytest.raises(RequestError, match="no picture"):
        requests.first(wait=False)
    requests.cancel()
    assert inputs.futures[21].cancelled()


def test_text_is_made_before_it_runs() -> None:
    requests, _ = pending([1, 2, 3, 4, 5])
    assert [request.prompt for request in requests.make_all()] == [1, 2, 3, 4, 5]
    assert taken(requests) == [1, 2, 3, 4, 5]


def test_a_thread_of_media_uses_one_core_and_others_theirs() -> None:
    usual, found = torch.get_num_threads(), []
    torch.set_num_threads(3)
    try:
        for work in (use_one_core, lambda: None):
            thread = threading.Thread(target=lambda work=work: (work(), found.append(torch.get_num_threads())))
            thread.start()
            thread.join()
        assert found == [1, 3] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(usual)
    assert media_workers(7) == 7 and 1 <= media_workers(None) <= 4
