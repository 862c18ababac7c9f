"""Configuration files: a command's long options as YAML, each with the line it stands on."""

from __future__ import annotations

import contextlib
import difflib
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace.cli.units import parse_size
from headrace.errors import ConfigError, RequestError
from headrace.host.user_files import read_text
from headrace.options import Option, check_value


class Entry(NamedTuple):
    """One key of a file."""

    key: str
    value: Any
    where: str
    """FILE:LINE, as an error names it."""


class Section(NamedTuple):
    """One key of a file whose values are mappings."""

    key: str
    entries: list[Entry]
    where: str


def read_config(path: str) -> list[Entry]:
    """The top-level keys of a YAML file, in their order. A null value means that the key is not set.

    Raises:
        ConfigError: the file cannot be read, is not a YAML mapping, or has a key twice; the error names the line.
    """
    with _yaml(path, "--config") as (loader, root):
        return [] if root is None else _entries(path, loader, root)


def read_sections(path: str, option: str) -> list[Section]:
    """The top-level keys of a YAML file of mappings, each with its keys. ``option``: the one that names the file.

    Raises: as ``read_config``.
    """
    with _yaml(path, option) as (loader, root):
        nodes = [] if root is None else root.value
        return [Section(str(key.value), _entries(path, loader, value), _line(path, key)) for key, value in nodes]


@contextlib.contextmanager
def _yaml(path: str, option: str) -> Iterator[tuple[Any, Any]]:
    """The loader and the root of a YAML file, a mapping; None of an empty one."""
    import yaml

    try:
        loader = yaml.SafeLoader(read_text(Path(path), option))
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}", option) from None
    try:
        root = loader.get_single_node()
        if root is not None:
            _check_mapping(path, root)
            _check_keys(path, root, set())
        yield loader, root
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise ConfigError(f"{path}:{line}: this is not YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not YAML that can be used: {' '.join(str(error).split())}", option) from None
    finally:
        loader.dispose()


def _check_mapping(path: str, node: Any) -> None:
    if node.id != "mapping":
        raise ConfigError(f"{_line(path, node)}: a configuration file is a mapping from options to values")


def _entries(path: str, loader: Any, node: Any) -> list[Entry]:
    _check_mapping(path, node)
    found = [Entry(str(key.value), loader.construct_object(value, deep=True), _line(path, key)) for key, value in node.value]
    return [entry for entry in found if entry.value is not None]


def _check_keys(path: str, node: Any, checked: set[int]) -> None:
    """Refuses duplicate keys in any mapping, of which YAML's own loader takes the last. ``checked``: ids of nodes."""
    if id(node) in checked or not isinstance(node.value, list):
        return
    checked.add(id(node))
    first: dict[str, Any] = {}
    for child in node.value:
        if not isinstance(child, tuple):
            _check_keys(path, child, checked)
            continue
        key, value = child
        name = field_name(str(key.value))
        if name in first:
            before = first[name].start_mark.line + 1
            raise ConfigError(f"{_line(path, key)}: {key.value} stands on line {before} already")
        first[name] = key
        _check_keys(path, value, checked)


def _line(path: str, node: Any) -> str:
    return f"{path}:{node.start_mark.line + 1}"


def field_name(key: str) -> str:
    """``max-model-len`` -> ``max_model_len``"""
    return key.replace("-", "_")


def match(entries: Iterable[Entry], keys: Mapping[str, Option], command: str) -> dict[str, tuple[Any, str]]:
    """Key -> (checked value, where it stands), for the keys of a command: its long options with underscores.

    Raises:
        ConfigError: a key is not an option of the command, or its value is of the wrong type or out of range.
    """
    found = {}
    for entry in entries:
        name = field_name(entry.key)
        if name not in keys:
            close = difflib.get_close_matches(name, keys, n=1) or [key for key in keys if name == f"no_{key}"]
            hint = f"; did you mean {close[0].replace('_', '-')}?" if close else ""
            raise ConfigError(f"{entry.where}: {entry.key} is not an option of {command}{hint}")
        try:
            found[name] = (_converted(keys[name], entry.value), entry.where)
        except (ConfigError, RequestError, ValueError) as error:
            hint = (
                "; quote it in YAML"
                if keys[name].type in (str, Path) and not isinstance(entry.value, (str, list, dict))
                else ""
            )
            raise ConfigError(f"{entry.where}: {error}{hint}") from None
    return found


def _converted(option: Option, value: Any) -> Any:
    """A value of YAML in the type of the field, checked."""
    if option.spec.size and isinstance(value, str):
        value = parse_size(value)
    elif typing.get_origin(option.type) is tuple:
        value = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
    else:
        value = option.from_json(value)
    check_value(option, value, ConfigError)
    return Path(value) if option.type is Path else value
