"""Functions get what they need as arguments. Modules hold constants, not state."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from rules.source import modules

MUTATORS = {"append", "add", "update", "extend", "insert", "pop", "popitem", "clear", "setdefault", "remove", "discard"}
CELLS = {"ContextVar", "local", "WeakKeyDictionary", "WeakValueDictionary"}
"""Calls that create process-wide state."""

ALLOWED = {
    # Backends and selectors are registered explicitly, by name, so that a new one needs no change to those that are there.
    "headrace/attention/select.py:_ENTRIES",
    "headrace/attention/selectors/registry.py:_ENTRIES",
    # FlashInfer is imported once a process, and the start of the process's engine holds that back.
    "headrace/attention/compiled.py:_may_begin",
    # Launches are made by whoever computes, models of others among them, and none can be told what to do instead.
    "headrace/kernels/cuda_launch.py:compiling",
}
"""``path:name``, each with its reason."""


def module_names(tree: ast.Module) -> set[str]:
    """Names bound by assignment at module level."""
    names = set()
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def local_names(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[str]:
    """Names that mean something of the function's own."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    names = {argument.arg for argument in every if argument is not None}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def problems(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """(line, name, what is wrong) of every module-level name that functions change, or that holds a cell."""
    names = module_names(tree)
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call) and called(node.value) in CELLS:
            yield node.lineno, ", ".join(sorted(module_names(ast.Module([node], [])))), f"is a {called(node.value)}"
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        yield from accessor(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                yield node.lineno, ", ".join(node.names), "is rebound by a function"
            elif (changed := changes(node)) in names and changed not in local_names(function):
                yield node.lineno, changed, "is changed by a function"


def accessor(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[int, str, str]]:
    """A cached function without arguments is a singleton by another name, unless what it returns is a constant table."""
    arguments = function.args
    cached = any(name in ("cache", "lru_cache") for name in map(decorator, function.decorator_list))
    if cached and not (arguments.args or arguments.posonlyargs or arguments.kwonlyargs):
        yield function.lineno, function.name, "is a cached function without arguments"


def decorator(node: ast.expr) -> str:
    return (
        called(node)
        if isinstance(node, ast.Call)
        else node.attr
        if isinstance(node, ast.Attribute)
        else getattr(node, "id", "")
    )


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def changes(node: ast.AST) -> str | None:
    """The name whose object this node changes: ``name[...] = ``, ``del name[...]``, ``name.append(...)``."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del) and isinstance(node.value, ast.Name):
        return node.value.id
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        return node.func.value.id if isinstance(node.func.value, ast.Name) else None
    return None


def test_module_level_holds_no_state() -> None:
    found = [
        f"{module.where}:{line} {name} {what}"
        for module in modules()
        for line, name, what in problems(module.tree)
        if f"{module.where}:{name}" not in ALLOWED
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "cache = {}\ndef put(k, v):\n    cache[k] = v\n",
        "seen = []\ndef note(x):\n    seen.append(x)\n",
        "engine = None\ndef set_engine(e):\n    global engine\n    engine = e\n",
        "from contextvars import ContextVar\ncurrent = ContextVar('current')\n",
        "import functools\n@functools.cache\ndef get_engine():\n    return object()\n",
    ],
)
def test_state_is_seen(text: str) -> None:
    assert list(problems(ast.parse(text)))


def test_constants_and_locals_pass() -> None:
    text = "TABLE = {'a': 1}\ndef build():\n    TABLE = {}\n    TABLE['b'] = 2\ndef read(k):\n    return TABLE[k]\n"
    assert not list(problems(ast.parse(text)))
