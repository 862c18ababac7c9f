"""A reader needs one room at a time: no circles of imports, folders and lists of imports that fit a page, and one class a name.

Imports under TYPE_CHECKING count, since a reader follows them too; those inside functions do not: they are late on purpose.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterator, Mapping

from rules.source import ROOT, Module, imports, modules

FILES = 25
IMPORTS = 18

SHARED = {"Checked", "Choice", "Conversation", "Entry", "Group", "Mark", "Message", "Reasoning"}
"""Names that classes of several modules have, each known in its own room alone."""


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those that run when the module is imported, or would if TYPE_CHECKING were true."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from statements([*node.body, *getattr(node, "orelse", [])])


@functools.cache
def graph() -> Mapping[str, frozenset[str]]:
    """Module -> modules of the package that it imports at its top. The package itself loads its names late."""
    known = {module.name for module in modules()} - {"headrace"}
    return {module.name: frozenset(targets(module, known) - {module.name}) for module in modules() if module.name in known}


def targets(module: Module, known: set[str]) -> set[str]:
    found = set()
    for node in statements(module.tree.body):
        if isinstance(node, ast.ImportFrom) and node.module:
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= named & known or {node.module} & known
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & known
    return found


def circles(edges: Mapping[str, frozenset[str]]) -> set[frozenset[str]]:
    """Sets of nodes that reach each other, by Tarjan's algorithm."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = set()

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in sorted(edges.get(node, ())):
            if other not in order:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            at = stack.index(node)
            members, stack[at:] = frozenset(stack[at:]), []
            if len(members) > 1:
                found.add(members)

    for node in edges:
        if node not in order:
            visit(node)
    return found


def test_modules_do_not_import_each_other_in_circles() -> None:
    assert circles(graph()) == set()


def test_rooms_do_not_import_each_other_in_circles() -> None:
    """Imports inside functions count between rooms."""
    edges: dict[str, set[str]] = {}
    for module in modules():
        if module.package:
            own = {name.split(".")[1] for _, name in imports(module) if name.startswith("headrace.")}
            edges.setdefault(module.package, set()).update(own - {module.package})
    assert circles({room: frozenset(others) for room, others in edges.items()}) == set()


def test_circles_are_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "d"}}
    assert circles({node: frozenset(others) for node, others in edges.items()}) == {frozenset("bc")}


def test_folders_fit_a_page() -> None:
    files = Counter(str(module.path.parent.relative_to(ROOT)) for module in modules())
    assert {folder: count for folder, count in files.items() if count > FILES} == {}


def test_imports_fit_a_page() -> None:
    assert {name: len(others) for name, others in graph().items() if len(others) > IMPORTS} == {}


def test_no_two_public_classes_have_one_name() -> None:
    names = Counter(
        node.name
        for module in modules()
        for node in module.tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, count in names.items() if count > 1} == SHARED
