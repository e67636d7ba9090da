"""Text files of a dataset, in the encodings that editors and tools write."""

import codecs
import re
from pathlib import Path

from kubelora_trainer.utils.errors import DatasetError

ESCAPED_BYTE = re.compile("[\udc80-\udcff]")
"""Byte that is not UTF-8, as Python's surrogateescape decodes it."""
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_ZERO_SHARE = 0.4
"""Share of zero bytes at even or odd places above which text is UTF-16: Latin letters have 1."""


def read_bytes(file: Path) -> bytes:
    """Read a file.

    Raises:
        DatasetError: The file can't be read.
    """
    try:
        return file.read_bytes()
    except OSError as error:
        raise DatasetError(f"{file} can't be read: {error.strerror}.") from error


def read_text(file: Path) -> str:
    """Read a text file in UTF-8, UTF-16 or UTF-32, without its byte-order mark.

    Raises:
        DatasetError: The file can't be read, or is in another encoding; the message has the offset.
    """
    content = read_bytes(file)
    text = decode_text(content)
    if problem := encoding_problem(text):
        raise DatasetError(f"{file} is {problem}. Save it as UTF-8.")
    return text


def decode_text(content: bytes) -> str:
    """Decode text by its byte-order mark, else as UTF-8 or as UTF-16 without a mark.

    Bytes that are not UTF-8 become ``ESCAPED_BYTE``, for ``encoding_problem``.
    """
    encoding = _encoding_of(content)
    if encoding != "utf-8":
        try:
            return content.decode(encoding).removeprefix("\ufeff")
        except UnicodeDecodeError:
            pass  # reported as what it is not: UTF-8
    return content.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogateescape")


def _encoding_of(content: bytes) -> str:
    for mark, encoding in _MARKS:
        if content.startswith(mark):
            return encoding
    for encoding, place in (("utf-16-le", 1), ("utf-16-be", 0)):
        units = content[place::2]
        # UTF-16 of Latin text is also valid UTF-8, with a zero byte in every second place.
        if units and units.count(0) > _ZERO_SHARE * len(units):
            return encoding
    return "utf-8"


def encoding_problem(text: str) -> str | None:
    """Describe the first byte of decoded text that is in no supported encoding."""
    if found := ESCAPED_BYTE.search(text):
        offset = len(text[: found.start()].encode("utf-8", "surrogateescape"))
        return f"not UTF-8: byte {offset} is 0x{ord(found[0]) - 0xDC00:02x}"
    if "\0" in text:
        return f"not text: character {text.index(chr(0))} is a zero byte"
    return None
