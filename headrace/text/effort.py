"""Reasoning effort: what a request's effort sets of a chat template's variables."""

from __future__ import annotations

import dataclasses
from typing import Any

from headrace.errors import ConfigError, RequestError, unsupported
from headrace.options import shown
from headrace.text.chat import parsed_template

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_PARAM = "reasoning_effort"
_SWITCHES = ("enable_thinking", "thinking")
_DEFAULT = "medium"
"""Effort that OpenAI assumes if the request names none."""


@dataclasses.dataclass(frozen=True)
class EffortVariables:
    """The variables of a chat template that an effort may set."""

    efforts: frozenset[str] | None = None
    """Values that the template compares its variable with; empty: it takes any. None: it has no such variable."""
    switch: str | None = None
    """The variable that switches reasoning off."""
    reasons: bool = False
    """Whether the model reasons at all."""

    @classmethod
    def of(cls, templates: list[str], *, reasons: bool) -> EffortVariables:
        from jinja2 import nodes

        names: set[str] = set()
        compared: set[str] = set()
        for template in templates:
            try:
                tree = parsed_template(template)
            except ConfigError:
                continue
            names |= {found.name for found in tree.find_all(nodes.Name) if found.ctx == "load"}
            for comparison in tree.find_all(nodes.Compare):
                if any(found.name == _PARAM for found in comparison.find_all(nodes.Name)):
                    values = (found.value for found in comparison.find_all(nodes.Const))
                    compared |= {value for value in values if isinstance(value, str)}
        efforts = frozenset(compared) if _PARAM in names else None
        return cls(efforts, next((name for name in _SWITCHES if name in names), None), reasons)

    def set_by(self, effort: str) -> dict[str, Any]:
        """Raises: RequestError: the template has no variable for this effort."""
        if effort not in EFFORTS:
            raise RequestError(f"{_PARAM} must be one of {', '.join(EFFORTS)}, not {shown(effort)}", _PARAM)
        if effort == "none" and self.switch is not None:
            return {self.switch: False}
        if self.efforts is not None and (effort in self.efforts or (not self.efforts and effort != "none")):
            return {_PARAM: effort}
        if effort == "none" and not self.reasons:
            return {}
        if effort == _DEFAULT and self.efforts is None:
            return {}
        raise unsupported(_PARAM, f"{_PARAM} {effort} is not supported: {self._refusal()}")

    def known(self) -> list[str]:
        """The efforts that a request may ask for."""
        known = ["none"] if self.switch is not None or not self.reasons else []
        known += [effort for effort in EFFORTS if effort in self.efforts] if self.efforts else []
        if self.efforts is None:
            known.append(_DEFAULT)
        elif not self.efforts:
            known += EFFORTS[1:]
        return known

    def _refusal(self) -> str:
        what = "has no such setting" if self.efforts is None else "knows others"
        return f"the model's chat template {what} (it may be left out, or be {', '.join(self.known())})"
