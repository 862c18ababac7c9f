"""A bystander's stream goes on beside every expensive request."""

from __future__ import annotations

import pytest
from support.server.running import Server

from e2e.pauses import bystander, cases, measure

LONGEST = 1.5
"""Seconds, on a machine that is busy with other things."""
SHARE = 0.2
"""Largest part of the time of a request that computes for longer: the stream gains tokens between the steps that it takes."""


@pytest.mark.slow
def test_no_request_pauses_the_streams_of_others(server: Server) -> None:
    with bystander(server) as client:
        pauses = {name: measure(server, client, path, body) for name, (path, body) in cases(2048).items()}
    assert {pause.status for pause in pauses.values()} <= {200, 400, 413}
    assert not {name: pause for name, pause in pauses.items() if pause.longest > max(LONGEST, SHARE * pause.seconds)}
