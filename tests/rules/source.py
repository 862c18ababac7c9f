"""Sources that the rules read: the package's modules, parsed."""

from __future__ import annotations

import ast
import dataclasses
import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "headrace"


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    name: str
    """Dotted: headrace.core.plan"""
    path: Path
    tree: ast.Module

    @property
    def package(self) -> str:
        """The folder, or the module, that stands directly in the package."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else ""

    @functools.cached_property
    def where(self) -> str:
        return str(self.path.relative_to(ROOT))

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree: every rule reads them."""
        return tuple(ast.walk(self.tree))


@functools.cache
def modules() -> tuple[Module, ...]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        found.append(Module(".".join(parts), path, ast.parse(path.read_text(encoding="utf-8"), str(path))))
    return tuple(found)


@functools.cache
def imports(module: Module) -> tuple[tuple[int, str], ...]:
    """(line, dotted name) of every import: at the top, in functions, and under TYPE_CHECKING."""
    return tuple(_imports(module))


def _imports(module: Module) -> Iterator[tuple[int, str]]:
    package = module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                start = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*start, base] if base else start)
            if base == "headrace":
                yield from ((node.lineno, f"headrace.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, base


def tracked_files() -> list[Path]:
    """Every file that is, or is about to be, part of the project."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        # An unpacked archive: what it holds is the project.
        return [path for path in ROOT.rglob("*") if path.is_file() and not set(path.parts) & {".venv", ".git", "__pycache__"}]
    return [ROOT / name for name in listed if (ROOT / name).is_file()]
