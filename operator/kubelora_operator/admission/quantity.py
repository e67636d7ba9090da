"""Kubernetes quantities. The client library's parser would load its synchronous client."""

import re
from decimal import Decimal
from typing import Final

_FORM: Final = re.compile(
    r"(?P<number>[0-9]+(\.[0-9]*)?|\.[0-9]+)([eE](?P<exponent>[0-9]{1,2})|(?P<suffix>[A-Za-z]*))"
)
_DECIMAL: Final = {s: Decimal(1000) ** i for i, s in enumerate(["", "k", "M", "G", "T", "P", "E"])}
_BINARY: Final = {f"{s}i": Decimal(1024) ** i for i, s in enumerate("KMGTPE", start=1)}
_SUFFIXES: Final = {**_DECIMAL, **_BINARY, "m": Decimal("0.001")}


def parse_quantity(value: object) -> Decimal | None:
    """Parse a quantity such as ``16Gi``, ``1e9`` or 4; None if it is not one, or negative."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    found = _FORM.fullmatch(str(value))
    if found is None or (found["suffix"] or "") not in _SUFFIXES:
        return None
    power = Decimal(10) ** int(found["exponent"] or 0)
    return Decimal(found["number"]) * _SUFFIXES[found["suffix"] or ""] * power
