"""An installed package has all of the code and every file that the code reads."""

from __future__ import annotations

import fnmatch
import tomllib

from rules.source import PACKAGE, ROOT, tracked_files


def test_every_file_of_the_package_travels() -> None:
    """A wheel contains modules and what ``package-data`` names, such as the sources of the native kernels."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    patterns = [f"{package.replace('.', '/')}/{pattern}" for package, named in declared.items() for pattern in named]
    inside = [path.relative_to(ROOT).as_posix() for path in tracked_files() if path.is_relative_to(PACKAGE)]
    data = [name for name in inside if not name.endswith(".py")]
    assert any(name.endswith(".cpp") for name in data)
    assert [name for name in data if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)] == []
    assert [pattern for pattern in patterns if not fnmatch.filter(data, pattern)] == []


def test_every_folder_with_modules_is_a_package() -> None:
    """setuptools leaves other folders out of a wheel."""
    folders = {path.parent for path in tracked_files() if path.is_relative_to(PACKAGE) and path.suffix == ".py"}
    assert [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()] == []
