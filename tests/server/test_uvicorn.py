"""The parts of uvicorn that are not its public API, and on which the server's limits and its shutdown depend.

A release of uvicorn may change them without notice. Its version therefore has an upper bound in pyproject.toml, which is
raised once the tests of this folder have passed with the newer release.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import tomllib
from importlib import metadata
from unittest import mock

import pytest
import uvicorn
from packaging.requirements import Requirement
from support.pages import ROOT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from headrace.server.protocol import LimitedProtocol
from headrace.server.run import DrainingServer

REPLACED = {
    LimitedProtocol: {"_start_asgi_task", "on_response_complete", "timeout_keep_alive_handler"},
    DrainingServer: {"handle_exit", "on_tick"},
}
"""Methods that uvicorn calls and ours replace."""
READ = {
    "_unset_keepalive_if_required",
    "connections",
    "cycle",
    "flow",
    "headers",
    "loop",
    "parser",
    "pipeline",
    "server_state",
    "timeout_keep_alive",
    "timeout_keep_alive_task",
    "transport",
    "url",
}
"""Other attributes of a connection."""
READ_OF_A_CYCLE = {
    "disconnected",
    "keep_alive",
    "message_event",
    "more_body",
    "response_complete",
    "response_started",
    "scope",
}
"""Attributes of the cycle that answers a request."""


def used(*owners: str) -> set[str]:
    """Attributes that the source of LimitedProtocol reads or sets on an expression."""
    nodes = ast.walk(ast.parse(inspect.getsource(LimitedProtocol)))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) in owners}


@pytest.mark.parametrize("ours", REPLACED)
def test_uvicorn_calls_the_methods_that_ours_replace(ours: type) -> None:
    theirs = ours.__mro__[1]
    # Transports of asyncio and the parser of httptools call the others, by names that are public.
    public = {name for name in vars(asyncio.Protocol) | vars(asyncio.BaseProtocol) if not name.startswith("__")}
    parser = {"on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body", "on_message_complete"}
    shared = vars(ours).keys() & vars(theirs).keys() - public - parser
    assert {name for name in shared if not name.startswith("__")} == REPLACED[ours]
    source = inspect.getsource(theirs)
    # The source, since other libraries replace methods of uvicorn's classes when they are imported.
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    parameters = {node.name: [parameter.arg for parameter in node.args.args] for node in functions}
    for name in REPLACED[ours]:
        assert f"self.{name}" in source, f"uvicorn does not call {name}"
        assert [*inspect.signature(getattr(ours, name)).parameters] == parameters[name]


def test_a_connection_has_what_is_read() -> None:
    transport = mock.Mock(spec=asyncio.Transport)
    transport.get_extra_info.return_value = None
    loop = asyncio.new_event_loop()
    made = HttpToolsProtocol(uvicorn.Config(mock.Mock()), ServerState(), {}, loop)
    loop.close()
    made.connection_made(transport)
    made.data_received(b"GET / HTTP/1.1\r\n")
    assert {name for name in used("self") - vars(LimitedProtocol).keys() if hasattr(made, name)} == READ
    assert made.url == b"/" and made.connections == {made} and not made.flow.write_paused
    assert made.server_state.default_headers == []
    assert STATUS_LINE[431].startswith(b"HTTP/1.1 431 ")


def test_a_cycle_has_what_is_read() -> None:
    assert used("cycle", "self.cycle", "self._started") == READ_OF_A_CYCLE
    source = inspect.getsource(RequestResponseCycle.__init__)
    assert {name for name in READ_OF_A_CYCLE if f"self.{name} = " not in source and f"self.{name}: " not in source} == set()


def test_the_installed_version_is_within_the_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (bounds,) = (made.specifier for text in project["dependencies"] if (made := Requirement(text)).name == "uvicorn")
    assert {bound.operator for bound in bounds} == {">=", "<"} and metadata.version("uvicorn") in bounds
