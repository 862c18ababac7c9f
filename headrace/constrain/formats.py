"""Regular expressions of formats that llguidance holds otherwise.

It allows the 29th of February in every year, and any leap second; it does not allow an IPv4 address at the end of an IPv6 one.
"""

from __future__ import annotations

_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY = "((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_DATE = f"({_YEAR}-{_DAY}|{_LEAP}-02-29)"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"

_HEX = "[0-9a-fA-F]{1,4}"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LAST = rf"({_HEX}:{_HEX}|{_BYTE}(\.{_BYTE}){{3}})"
"""The last 32 bits of an IPv6 address."""


def _ipv6() -> str:
    """RFC 3986, section 3.2.2: eight groups, or fewer around "::"."""
    forms = [f"({_HEX}:){{6}}{_LAST}"]
    for after in range(7, -1, -1):  # groups that may follow "::"
        behind = f"({_HEX}:){{{after - 2}}}{_LAST}" if after >= 2 else _HEX * after
        most = 7 - after
        forms.append((f"(({_HEX}:){{0,{most - 1}}}{_HEX})?" if most else "") + f"::{behind}")
    return "|".join(forms)


PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "ipv6": f"^({_ipv6()})$",
}
"""Format -> pattern: of dates and times, RFC 3339 from year 1 on, without leap seconds."""
