"""CLIP's tokenizer files, built from the byte-pair merges that OpenAI published with CLIP.

The vocabulary is derived, not stored: 256 bytes, the same 256 with an end-of-word mark, one token
for each of the 48,894 merges, and two special tokens make the 49,408 ids of SDXL's text encoders.
"""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

START = "<|startoftext|>"
END = "<|endoftext|>"
MAX_TOKENS = 77
"""CLIP's context length, with start and end."""
MERGES = 49152 - 256 - 2  # CLIP uses only the first of the published merges


@dataclass(frozen=True)
class Vocabulary:
    """Ids of all tokens, and the merges ("a b") in their order of priority."""

    ids: dict[str, int]
    merges: tuple[str, ...]


def read_vocabulary(merges_file: Path) -> Vocabulary:
    """Read a vocabulary from a gzipped list of merges whose first line is a version."""
    with gzip.open(merges_file, "rt", encoding="utf-8") as lines:
        merges = tuple(lines.read().split("\n")[1 : MERGES + 1])
    letters = _byte_letters()
    tokens = [*letters, *(letter + "</w>" for letter in letters)]
    tokens += [merge.replace(" ", "") for merge in merges] + [START, END]
    return Vocabulary({token: number for number, token in enumerate(tokens)}, merges)


def write_tokenizer(folder: Path, vocabulary: Vocabulary, pad_token: str) -> None:
    """Write the four files of a CLIPTokenizer directory in an SDXL pipeline.

    Args:
        folder: Directory to create.
        vocabulary: Ids and merges.
        pad_token: Padding token, which differs between SDXL's two tokenizers.
    """
    folder.mkdir(parents=True)
    _write_json(folder / "vocab.json", vocabulary.ids)
    merges = "\n".join(("#version: 0.2", *vocabulary.merges)) + "\n"
    (folder / "merges.txt").write_text(merges, encoding="utf-8")
    special = {"bos_token": START, "eos_token": END, "pad_token": pad_token, "unk_token": END}
    _write_json(folder / "special_tokens_map.json", special)
    _write_json(
        folder / "tokenizer_config.json",
        {
            **special,
            "tokenizer_class": "CLIPTokenizer",
            "model_max_length": MAX_TOKENS,
            "do_lower_case": True,
            "add_prefix_space": False,
            "errors": "replace",
        },
    )


def _byte_letters() -> list[str]:
    """Assign a printable character to each byte: itself if printable, else one from U+0100 on.

    The order is CLIP's: printable bytes first. Source: the byte-level BPE of GPT-2.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = 256 - len(printable)
    return [chr(byte) for byte in printable] + [chr(0x100 + n) for n in range(others)]


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
