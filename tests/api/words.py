"""Words that the product's prose avoids, and where they occur.

``python -m tests.api.words [CHECKOUT]`` prints how often each occurs. Prose is docstrings, comments
and messages of the product's modules, descriptions of the CRD, README, CONTRIBUTING, the
Makefile and the pages of docs.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("crds/kubelora_api", "operator/kubelora_operator", "trainer/kubelora_trainer", "charts")
PAGES = ("README.md", "CONTRIBUTING.md", "Makefile", "docs/*.md", "crds/*.yaml")

# "for" in the sense of "because" is followed by a clause: a pronoun, or a noun and its verb.
_CLAUSE = r"(it|they|there|he|she|we|you|nothing|nobody|what)\b"
_VERB = (
    r"(is|are|was|were|has|have|had|would|could|can|can't|cannot|needs?|does|do|must|may|will"
    r"|decides?|holds?|gives?|makes?|takes?|comes?|begins?)\b"
)
_WORDS = r"( (?!that\b|which\b|who\b)[\w'`.-]+){1,5}"
_PRONOUN = rf"(each|this|that|some) {_VERB}"
_NOUN = rf"(the|a|an|its|their|each|this|that|every|no|some|of)\b{_WORDS} {_VERB}"
AVOIDED = {
    "told": r"\btold\b",
    "tells": r"\btells\b|\btell\b(?! (which|whether)\b)|\btelling\b",
    "untold": r"\buntold\b",
    "says": r"\bsays\b",
    "goes on": r"\bgoes on\b|\bgo on\b|\bgoing on\b|\bwent on\b",
    "anew": r"\banew\b",
    "mend": r"\bmend(s|ed|ing)?\b",
    "beside": r"\bbeside\b",
    "stands": r"\bstands?\b(?! still)|\bstood\b|\bstanding\b",
    "whole": r"\bwhole\b(?! (numbers?|seconds)\b)|\bwholly\b",
    ", for (because)": rf", for ({_CLAUSE}|{_PRONOUN}|{_NOUN})",
    "hand in": r"\bhand(s|ed|ing)? in\b",
    "a word": r"\bwithout a word\b|\bno word\b|\ba word\b|\blast words?\b|\bin \w+ words\b",
    "hold against": r"\b(hold|holds|held|holding)\b( \w+){0,3} against\b",
}


@dataclass(frozen=True)
class Occurrence:
    """An avoided word in a file, with the sentence around it."""

    word: str
    file: str
    line: int
    text: str


def occurrences(root: Path = ROOT) -> Iterator[Occurrence]:
    """Yield every avoided word in the product's prose below ``root``."""
    for file, line, written in _prose(root):
        text = re.sub(r"\n\s*(#\s*)?", "\n", written)  # sentences run over lines
        for word, pattern in AVOIDED.items():
            for match in re.finditer(pattern.replace(" ", r"\s+"), text, re.IGNORECASE):
                around = text[max(0, match.start() - 60) : match.end() + 40]
                at = line + text.count("\n", 0, match.start())
                yield Occurrence(word, file, at, " ".join(around.split()))


def _prose(root: Path) -> Iterator[tuple[str, int, str]]:
    """Yield file, first line and text of each piece of prose."""
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            yield from ((str(path.relative_to(root)), *piece) for piece in _of_module(path))
    for pattern in PAGES:
        for path in sorted(root.glob(pattern)):
            yield str(path.relative_to(root)), 1, path.read_text()


def _of_module(path: Path) -> Iterator[tuple[int, str]]:
    """Yield string literals (docstrings and messages) and blocks of comments."""
    source = path.read_text()
    tree = ast.parse(source)
    within = {id(part) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for part in n.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else "{}" for p in node.values)
            yield node.lineno, "".join(str(part) for part in parts)
        elif isinstance(node, ast.Constant) and id(node) not in within:
            text = node.value if isinstance(node.value, str) else ""
            yield from [(node.lineno, text)] if " " in text else []  # one word is an identifier
    block: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if block and token.start[0] != block[-1].start[0] + 1:
            yield block[0].start[0], "\n".join(one.string for one in block)
            block = []
        block.append(token)
    if block:
        yield block[0].start[0], "\n".join(one.string for one in block)


def main() -> None:
    """Print the count of each avoided word in a checkout."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    counts = Counter(found.word for found in occurrences(root))
    for word in AVOIDED:
        print(f"{word:16} {counts[word]:5}")
    print(f"{'all':16} {sum(counts.values()):5}")


if __name__ == "__main__":
    main()
