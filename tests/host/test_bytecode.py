"""Bytecode is kept in the user's cache where an installation has none, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.host.bytecode import keep_bytecode


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages without bytecode, in which Python writes none."""
    packages = tmp_path / "packages"
    for name in ("torch", "flume"):
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").write_text("value = 1\n")
    (packages / "flume-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    # What the function sets and removes is undone.
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return packages


def kept(cache: Path, library: str = "flume") -> str | None:
    return sys.pycache_prefix if keep_bytecode(cache, library) else None


def test_the_folder_is_the_users_alone_and_one_for_each_installation(installed: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = kept(cache)
    assert first is not None and Path(first).parent == cache / "bytecode"
    assert Path(first).stat().st_mode & 0o777 == 0o700
    assert os.environ["PYTHONPYCACHEPREFIX"] == first
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ and not sys.dont_write_bytecode
    for name in ("flume-1.0", "flume-1.1"):
        sys.pycache_prefix, sys.dont_write_bytecode = None, True
        (installed / f"{name}.dist-info").mkdir(exist_ok=True)
        again = kept(cache)
        assert (again == first) == (name == "flume-1.0")


def test_a_folder_that_others_can_write_is_not_used(installed: Path, tmp_path: Path) -> None:
    folder = kept(tmp_path)
    assert folder is not None
    sys.pycache_prefix = None
    sys.dont_write_bytecode = True
    os.chmod(folder, 0o777)
    assert kept(tmp_path) is None
    os.rmdir(folder)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    os.symlink(tmp_path / "elsewhere", folder)
    assert kept(tmp_path) is None
    assert sys.pycache_prefix is None and sys.dont_write_bytecode


@pytest.mark.parametrize("why", ["bytecode", "written", "prefix", "absent", "no cache"])
def test_nothing_changes_where_python_keeps_it_or_none_can_be_kept(
    why: str, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    match why:
        case "bytecode":
            subprocess.run([sys.executable, "-m", "compileall", "-q", installed], check=True)
        case "written":
            monkeypatch.setattr(sys, "dont_write_bytecode", False)
        case "prefix":
            monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
        case "no cache":
            cache.write_text("a file where the folder would be")
    before = sys.pycache_prefix, sys.dont_write_bytecode, dict(os.environ)
    assert not keep_bytecode(cache, "flum" if why == "absent" else "flume")
    assert (sys.pycache_prefix, sys.dont_write_bytecode, dict(os.environ)) == before


def test_the_command_keeps_its_own(installed: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPYCACHEPREFIX"}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-m", "headrace.cli", "--version"], env=environment, check=True, stdout=subprocess.DEVNULL)
    (folder,) = (tmp_path / "headrace" / "bytecode").iterdir()
    assert [path.name.partition(".")[0] for path in folder.rglob("headrace/cli/main.*")] == ["main"]
    assert not list(installed.rglob("*.pyc"))
