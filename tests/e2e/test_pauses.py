"""A bystander's stream goes on beside every expensive request."""

from __future__ import annotations

import pytest

from e2e.pauses import bystander, cases, measure
from e2e.running import Server

LONGEST = 3.0
"""Seconds, on a machine that is busy with other things. What one request held up before took from 2 to 50."""


@pytest.mark.slow
def test_no_request_pauses_the_streams_of_others(server: Server) -> None:
    with bystander(server) as client:
        pauses = {name: measure(server, client, path, body) for name, (path, body) in cases(2048).items()}
    assert {pause.status for pause in pauses.values()} <= {200, 400}
    assert not {name: pause for name, pause in pauses.items() if pause.longest > LONGEST}
