"""The product's prose keeps clear of words that a native engineer would not use there."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.api.words import AVOIDED, ROOMS, ROOT, Occurrence, occurrences

ALLOWED = {
    ("docs/numerics-results.md", "optimizer made anew"): "the name of a fault in the benchmark",
    ("docs/performance.md", "over whole rounds"): "rounds that are not cut",
    ("docs/performance.md", "by the whole interval"): "of an interval, against its middle",
    ("docs/several-gpus.md", "admits whole Jobs"): "Kueue's own phrase",
}
"""Occurrences that are right, by file and phrase, each with its reason."""


def _is_allowed(found: Occurrence) -> bool:
    return any(file == found.file and phrase in found.text for file, phrase in ALLOWED)


def test_avoided_words_do_not_occur(capsys: pytest.CaptureFixture[str]) -> None:
    found = list(occurrences())
    counts = Counter(one.word for one in found)
    with capsys.disabled():
        print("\navoided words:", ", ".join(f"{word} {counts[word]}" for word in AVOIDED))
    left = [f"{o.file}:{o.line}: {o.word}: {o.text}" for o in found if not _is_allowed(o)]
    assert left == []


def test_each_allowed_phrase_still_occurs() -> None:
    stale = [
        phrase
        for file, phrase in ALLOWED
        if phrase not in " ".join((ROOT / file).read_text().split())
    ]
    assert stale == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('"""The run goes\n    on."""', ["goes on"]),
        ('x = f"{1} is told {2}"', ["told"]),
        ("# one line that ends in held\n# against another", ["hold against"]),
        ('x = "it fails, for the disk is full"', [", for (because)"]),
        ('x = "a place, for a run of a day"', []),
        ('x = "it is bounded, for each is a label"', [", for (because)"]),
        ('x = "a sum, for each of the ranks"', []),
        ('told = "told"  # an identifier', []),
    ],
)
def test_docstrings_messages_and_comments_are_read(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    module = tmp_path / ROOMS[0] / "module.py"
    module.parent.mkdir(parents=True)
    module.write_text(text)
    assert [found.word for found in occurrences(tmp_path)] == words


def test_a_public_name_is_defined_once_in_the_product() -> None:
    """So that it can be found by its name. Each program has its ``main``, a module its logger."""
    places: dict[str, list[str]] = defaultdict(list)
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            for name in _defined(ast.parse(path.read_text()).body):
                if not name.startswith("_"):
                    places[name].append(str(path.relative_to(ROOT)))
    for name in ("main", "log", "logger"):
        places.pop(name, None)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("A = B = 1", {"A", "B"}),
        ("A, (B, *C) = 1, (2, 3)", {"A", "B", "C"}),
        ("A: int = 1", {"A"}),
        ("if x:\n    A = 1\nelif y:\n    A = 2\nelse:\n    def b(): c = 1", {"A", "b"}),
        ("try:\n    A = 1\nexcept ValueError:\n    B = 1\nfinally:\n    C = 1", {"A", "B", "C"}),
        ("class A:\n    b = 1", {"A"}),
        ("from x import A\nA.b = 1\nA[0] = 1", set()),
    ],
)
def test_names_at_the_top_of_a_module_are_found(source: str, names: set[str]) -> None:
    assert _defined(ast.parse(source).body) == names


def _defined(body: Sequence[ast.stmt]) -> set[str]:
    """Return the names of functions, classes and variables at the top of a module."""
    names: set[str] = set()
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Assign():
                names |= {name for target in node.targets for name in _assigned(target)}
            case ast.AnnAssign(target=target):
                names |= set(_assigned(target))
            case ast.If():
                names |= _defined([*node.body, *node.orelse])
            case ast.Try():
                handlers = [statement for handler in node.handlers for statement in handler.body]
                names |= _defined([*node.body, *handlers, *node.orelse, *node.finalbody])
    return names


def _assigned(target: ast.expr) -> Iterator[str]:
    """Yield the names that an assignment to ``target`` defines."""
    match target:
        case ast.Name(id=name):
            yield name
        case ast.Tuple() | ast.List():
            for element in target.elts:
                yield from _assigned(element)
        case ast.Starred(value=value):
            yield from _assigned(value)
