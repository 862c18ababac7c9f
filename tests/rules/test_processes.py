"""Processes of headrace are started, spoken with and ended in one way: ``headrace/host``."""

from __future__ import annotations

import ast

from rules.source import imports, modules

PLACES = {
    # Reads checkpoints that others wrote, with an unpickler that makes nothing but plain data.
    "pickle": {"headrace.sources.megatron"},
    # Publishes to programs that are not headrace's.
    "zmq": {"headrace.processes.kv_events"},
    "multiprocessing": set[str](),
}
"""Module -> who may import it."""


def test_messages_cannot_run_code_and_have_one_channel() -> None:
    wrong = [
        f"{module.where}:{line} imports {name}"
        for module in modules()
        for line, name in imports(module)
        if module.name not in PLACES.get(name.split(".")[0], {module.name})
    ]
    assert wrong == []


def test_the_places_are_there() -> None:
    used = {(name.split(".")[0], module.name) for module in modules() for _, name in imports(module)}
    assert {(name, place) for name, places in PLACES.items() for place in places} <= used


def test_one_place_ends_a_process_at_once() -> None:
    calls = [
        module.name
        for module in modules()
        for node in module.nodes
        if isinstance(node, ast.Attribute) and node.attr in ("_exit", "abort") and getattr(node.value, "id", "") == "os"
    ]
    assert calls == ["headrace.host.parent"]
