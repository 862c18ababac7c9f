"""Counts the code by package at two revisions: lines, files, imports, and how far optional subsystems reach.

    python benchmarks/package_sizes.py 49275927 HEAD

A package is a folder or a module that stands directly in headrace/. Lines of code have no blank lines, comments or docstrings.
Imports of a module are the modules of ours that it imports at its top, under TYPE_CHECKING too. A package imports a subsystem
if one of its modules imports, anywhere, a module in whose name a word of the subsystem stands.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
SUBSYSTEMS = {"sparse heads": ("sparse",), "media": ("media", "vision", "multimodal")}
BUSIEST = 10
_NOT_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


class Tree:
    """The Python modules of a revision, by dotted name."""

    def __init__(self, revision: str) -> None:
        archive = subprocess.run(["git", "archive", revision, "headrace"], cwd=ROOT, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            members = [member for member in files.getmembers() if member.isfile() and member.name.endswith(".py")]
            sources = {_name(member.name): files.extractfile(member).read().decode() for member in members}  # type: ignore[union-attr]
        self.trees = {name: ast.parse(source) for name, source in sources.items()}
        self.lines = {name: code_lines(source, self.trees[name]) for name, source in sources.items()}

    def imports(self, name: str, nodes: Iterable[ast.AST]) -> set[str]:
        """Modules of the package that the nodes of a module import."""
        found: set[str] = set()
        for node in nodes:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                named = {f"{node.module}.{alias.name}" for alias in node.names} & self.trees.keys()
                found |= named or {node.module}
        return (found & self.trees.keys()) - {name, "headrace"}

    def busiest(self) -> list[tuple[str, int]]:
        counts = Counter({name: len(self.imports(name, _at_top(tree.body))) for name, tree in self.trees.items()})
        return counts.most_common(BUSIEST)

    def reached(self, words: tuple[str, ...]) -> list[str]:
        """Packages that import modules of a subsystem."""
        own = {name for name in self.trees if any(word in part for part in name.split(".")[1:] for word in words)}
        return sorted({_package(name) for name, tree in self.trees.items() if self.imports(name, ast.walk(tree)) & own})


def _name(path: str) -> str:
    return ".".join(part for part in PurePosixPath(path).with_suffix("").parts if part != "__init__")


def _package(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def _at_top(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _at_top([*node.body, *getattr(node, "orelse", [])])


def code_lines(source: str, tree: ast.Module) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for token in tokens if token.type not in _NOT_CODE for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def by_package(counts: Mapping[str, int]) -> Mapping[str, int]:
    total: Counter[str] = Counter()
    for name, count in counts.items():
        total[_package(name)] += count
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revisions", nargs=2, metavar="REVISION")
    trees = [Tree(revision) for revision in parser.parse_args().revisions]
    lines = [by_package(tree.lines) for tree in trees]
    files = [by_package(dict.fromkeys(tree.trees, 1)) for tree in trees]
    print("| package | lines before | after | files before | after |\n| --- | ---: | ---: | ---: | ---: |")
    for name in sorted(lines[0].keys() | lines[1].keys(), key=lambda name: (-lines[1][name], name)):
        print(f"| {name} | " + " | ".join(f"{counts[name]:,}" for counts in (*lines, *files)) + " |")
    print("| all | " + " | ".join(f"{sum(counts.values()):,}" for counts in (*lines, *files)) + " |")
    print("\n| imports before | | after | |\n| --- | ---: | --- | ---: |")
    for (old, before), (new, after) in zip(*(tree.busiest() for tree in trees), strict=True):
        print(f"| {old} | {before} | {new} | {after} |")
    print("\n| packages that import | before | | after | |\n| --- | ---: | --- | ---: | --- |")
    for subsystem, words in SUBSYSTEMS.items():
        reached = [tree.reached(words) for tree in trees]
        print(f"| {subsystem} | " + " | ".join(f"{len(names)} | {', '.join(names)}" for names in reached) + " |")


if __name__ == "__main__":
    main()
