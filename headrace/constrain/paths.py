"""Longest paths in what clients give. The library recurses along them; here a loop follows them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from headrace.constrain.lark import QUIET
from headrace.errors import RequestError

PATH_DEPTHS = 8
"""Ratio of the longest path through references or rules to the limit of a schema's nesting."""
_RULE = re.compile(r"^[ \t]*[?!]?(\w+)(?:\.-?\d+)?(?:\[[^\]\n]*\])?\s*:", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_]\w*")


def check_rules(grammar: str, max_depth: int) -> None:
    """Raises: RequestError: the rules of a Lark grammar call each other through too many others."""
    _, *named = _RULE.split(QUIET.sub(" ", grammar))
    rules = {name: _NAME.findall(body) for name, body in zip(named[::2], named[1::2], strict=True)}
    length, first = longest_path(rules)
    if length > (most := PATH_DEPTHS * max_depth):
        raise RequestError(f"grammar has a chain of {length} rules from {first!r} on, more than the limit of {most}", "grammar")


def longest_path(edges: Mapping[str, Iterable[str]]) -> tuple[int, str]:
    """Nodes of the longest path that does not go back to a node that it has passed, and its first node.

    Of each cycle one edge is left out, that to the node which was visited first.
    """
    lengths: dict[str, int] = {}
    """Nodes of the longest path that starts at a node, as far as known."""
    for root in edges:
        if root in lengths:
            continue
        path, passed, lengths[root] = [(root, iter(edges[root]))], {root}, 1
        while path:
            node, others = path[-1]
            for other in others:
                if other not in lengths and other in edges:
                    path.append((other, iter(edges[other])))
                    passed.add(other)
                    lengths[other] = 1
                    break
                if other in lengths and other not in passed:
                    lengths[node] = max(lengths[node], lengths[other] + 1)
            else:
                path.pop()
                passed.remove(node)
                if path:
                    lengths[path[-1][0]] = max(lengths[path[-1][0]], lengths[node] + 1)
    return max(((length, node) for node, length in lengths.items()), key=lambda found: found[0], default=(0, ""))
