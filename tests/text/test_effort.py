"""Variables of a chat template that reasoning_effort sets."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import RequestError
from headrace.text.effort import EFFORTS, EffortVariables

SWITCH = "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
OTHER_SWITCH = "{% generation %}{% if thinking %}<think>{% endif %}{% endgeneration %}"
FREE = (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}Reasoning: {{ reasoning_effort }}"
)
COMPARED = "{% if reasoning_effort == 'low' or reasoning_effort in ['high'] %}x{% endif %}" + SWITCH
NOTHING = "{{ messages[0].content }} reasoning_effort enable_thinking"


@pytest.mark.parametrize(
    ("template", "reasons", "taken"),
    [
        (SWITCH, True, {"none": {"enable_thinking": False}, "medium": {}}),
        (OTHER_SWITCH, True, {"none": {"thinking": False}, "medium": {}}),
        (FREE, True, {effort: {"reasoning_effort": effort} for effort in EFFORTS[1:]}),
        (COMPARED, True, {"none": {"enable_thinking": False}, **{e: {"reasoning_effort": e} for e in ("low", "high")}}),
        (NOTHING, True, {"medium": {}}),
        (NOTHING, False, {"none": {}, "medium": {}}),
        ("{% broken", False, {"none": {}, "medium": {}}),
    ],
)
def test_efforts_set_the_variables_of_the_template_or_are_refused(
    template: str, reasons: bool, taken: dict[str, dict[str, Any]]
) -> None:
    found = EffortVariables.of([template], reasons=reasons)
    for effort in EFFORTS:
        if effort in taken:
            assert found.set_by(effort) == taken[effort]
            continue
        with pytest.raises(
            RequestError, match=f"reasoning_effort {effort}.*or be {', '.join(e for e in EFFORTS if e in taken)}"
        ):
            found.set_by(effort)


def test_an_effort_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="none, minimal, low") as found:
        EffortVariables().set_by("extreme")
    assert found.value.param == "reasoning_effort"
