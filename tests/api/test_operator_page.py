"""``docs/operator.md`` explains each reason that the operator writes, and no other."""

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
OPERATOR = ROOT / "operator"
# Where each of these takes its reason.
REASON_ARGUMENT = {
    "Explanation": 0,
    "JobEvent": 1,
    "clear_condition": 1,
    "set_not_running": 1,
    "_set_waiting": 1,
    "set_condition": 2,
    "set": 2,
    "about": 2,
}
# Reasons of a batch/v1 Job, which the rules read and don't write.
INTERNAL = {"BackoffLimitExceeded", "Unknown"}
CAMEL_CASE = re.compile(r"[A-Z][A-Za-z]+")


def reasons_in(tree: ast.AST, module: ModuleType) -> Iterator[str]:
    """Yield the reasons that a module passes on, as literals or constants."""
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        name = getattr(call.func, "id", None) or getattr(call.func, "attr", "")
        at = REASON_ARGUMENT.get(str(name))
        if at is None or at >= len(call.args):
            continue
        for part in ast.walk(call.args[at]):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value
            elif isinstance(part, ast.Name):
                yield str(getattr(module, part.id, ""))


def test_each_reason_of_the_operator_has_a_row() -> None:
    found: set[str] = set()
    for path in OPERATOR.rglob("*.py"):
        tree = ast.parse(path.read_text())
        name = ".".join(path.relative_to(OPERATOR).with_suffix("").parts)
        if any(f"{call}(" in path.read_text() for call in REASON_ARGUMENT):
            found |= set(reasons_in(tree, import_module(name)))
    found = {reason for reason in found if CAMEL_CASE.fullmatch(reason)} - INTERNAL
    page = (ROOT / "docs" / "operator.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert rows == sorted(rows), "the rows are in the order of the alphabet"
    assert set(rows) - found == set(), "the page explains reasons that nothing writes"
    assert found - set(rows) == set(), "reasons without a row"
