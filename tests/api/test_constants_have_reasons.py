"""Constants of the product: each number at the top of a module has its unit, source or reason."""

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
MODULES = sorted(REPOSITORY.glob("*/kubelora_*/**/*.py"))


def is_number(value: ast.expr) -> bool:
    """A number, arithmetic of numbers, or a call such as timedelta(seconds=5) of numbers only."""
    if isinstance(value, ast.Constant):
        return isinstance(value.value, int | float) and not isinstance(value.value, bool)
    if isinstance(value, ast.BinOp):
        return is_number(value.left) and is_number(value.right)
    if isinstance(value, ast.UnaryOp):
        return is_number(value.operand)
    if isinstance(value, ast.Tuple):
        return bool(value.elts) and all(map(is_number, value.elts))
    if isinstance(value, ast.Call):
        given = [*value.args, *(k.value for k in value.keywords)]
        return bool(given) and all(map(is_number, given))
    return False


def bare_numbers(source: str) -> list[str]:
    """Return the names of top-level numbers with neither a docstring below nor a comment.

    A comment also covers the constants on the lines right after the one below it.
    """
    lines = source.splitlines()
    body = ast.parse(source).body
    found: list[str] = []
    covered = 0  # the last line that a comment covers
    for statement, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
            continue
        first, last = statement.lineno, statement.end_lineno or statement.lineno
        if "#" in lines[first - 1] or lines[first - 2].startswith("#") or covered == first - 1 > 0:
            covered = last
            continue
        documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if is_number(statement.value) and not documented:
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            found.append(ast.unparse(target))
    return found


@pytest.mark.parametrize(
    ("source", "bare"),
    [
        ("A = 3\n", ["A"]),
        ("A: Final = timedelta(seconds=5)\n", ["A"]),
        ('A = 3\n"""Three of them."""\n', []),
        ("A = 3  # of them\n", []),
        ("# Of them.\nA = 3\nB = 4\n", []),
        ("# Of them.\nA = 3\n\nB = 4\n", ["B"]),
        ("A = 'text'\nB = f(x)\n", []),
        ("A = -2 * 1024\n", ["A"]),
    ],
)
def test_a_bare_number_is_found(source: str, bare: list[str]) -> None:
    assert bare_numbers(source) == bare


def test_every_constant_has_its_reason() -> None:
    bare = {str(m.relative_to(REPOSITORY)): bare_numbers(m.read_text()) for m in MODULES}
    assert len(bare) > 150
    assert not [f"{file}: {', '.join(names)}" for file, names in bare.items() if names], (
        "add a docstring below each, or a comment, with the unit, the source or the reason"
    )
