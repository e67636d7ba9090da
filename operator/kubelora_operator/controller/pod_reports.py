"""Reports of pods: the body of ``GET /status`` and the termination message.

A pod runs an image chosen by the user, so its answers are not trusted: sizes and times are bounded,
redirects are not followed, types are strict, numbers that do not fit into a status are dropped,
text loses its control characters, and the report must be about this run.
"""

import asyncio
import json
import math
import re
from typing import Final

import aiohttp
from pydantic import ValidationError

from kubelora_api import names
from kubelora_api.log_lines import messages_of
from kubelora_api.report import FinalReport, RunReport
from kubelora_operator.decision.snapshot import TrainerPod, Unreachable

_TIMEOUT: Final = 3.0
"""Seconds; a trainer answers within milliseconds, also between two steps."""
_BODY_MAX: Final = 256 * 1024
"""A report has a few KiB; a pod must not be able to fill the operator's memory."""
_INTEGER_MAX: Final = 2**53
"""Largest integer that every JSON reader represents exactly."""
_MESSAGE_MAX: Final = 600
"""Characters of a sentence from a pod, so that ten findings fit the status."""
_ESCAPE_CODE: Final = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])"
)
"""ANSI control sequences and operating system commands, which a terminal would obey."""


async def fetch_report(
    session: aiohttp.ClientSession, pod: TrainerPod, run_id: str
) -> RunReport | Unreachable:
    """Request the report of a running pod.

    Args:
        session: HTTP client.
        pod: The pod to ask.
        run_id: uid of the job that the report must be about.

    Returns:
        The report, or why there is none.
    """
    if not pod.address:
        return Unreachable("the pod has no address yet")
    host = f"[{pod.address}]" if ":" in pod.address else pod.address
    url = f"http://{host}:{names.METRICS_PORT}/status"
    try:
        async with (
            asyncio.timeout(_TIMEOUT),
            session.get(url, allow_redirects=False) as answer,
        ):
            body = await _bounded(answer.content)
            status = answer.status
    except TimeoutError:
        return Unreachable(f"no answer from {url} within {_TIMEOUT:g} s")
    except (aiohttp.ClientError, OSError) as error:
        return Unreachable(f"{url}: {str(error) or type(error).__name__}")
    if status != 200:
        return Unreachable(f"{url} answered with HTTP {status}")
    if body is None:
        return Unreachable(f"{url} answered with more than {_BODY_MAX} bytes")
    return parse_report(body, run_id, pod.attempt)


def parse_report(body: bytes, run_id: str, attempt: int) -> RunReport | Unreachable:
    """Parse a report; Unreachable if it is invalid or about another run.

    Args:
        body: The HTTP body.
        run_id: uid of the job that the report must be about.
        attempt: Attempt that the report must be about.
    """
    try:
        report = RunReport.model_validate(_parse(body), strict=True)
    except (ValueError, ValidationError, RecursionError):
        return Unreachable("the answer is not a report of a KubeLoRA trainer")
    if report.run_id != run_id or report.attempt != attempt:
        return Unreachable(
            f"the answer is about run {report.run_id[:64]}, attempt {report.attempt}, not this one"
        )
    return report


def parse_termination_message(
    message: str, run_id: str, attempt: int
) -> tuple[FinalReport | None, str]:
    """Parse a termination message.

    Args:
        message: The termination message.
        run_id: uid of the job that the report must be about.
        attempt: Attempt that the report must be about.

    Returns:
        The final report, or None and the end of the message as printable text.
    """
    try:
        final = FinalReport.model_validate(_parse(message.encode()), strict=True)
    except (ValueError, ValidationError, RecursionError):
        return None, _printable(messages_of(message))
    if final.run_id != run_id or final.attempt != attempt:
        return None, ""
    return final.model_copy(update={"artifacts": final.artifacts[:32]}), ""


async def _bounded(stream: aiohttp.StreamReader) -> bytes | None:
    body = b""
    async for chunk in stream.iter_chunked(65536):
        body += chunk
        if len(body) > _BODY_MAX:
            return None
    return body


def _parse(body: bytes) -> object:
    """Parse JSON whose numbers and text fit into a status: NaN and infinities become null.

    Raises ValueError for an integer that JSON readers cannot represent exactly.
    """
    return _clean(
        json.loads(body, parse_constant=lambda _: None, parse_float=_finite, parse_int=_bounded_int)
    )


def _clean(value: object) -> object:
    """Remove escape codes and control characters from every text; refuse negative integers.

    Nothing that a report counts is negative: steps, attempts, bytes.
    """
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, int) and value < 0:
        raise ValueError("negative integer")
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {clean_text(key): _clean(item) for key, item in value.items()}
    return value


def clean_text(text: str) -> str:
    """Return the text without escape codes, with a space for each other control character."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in _ESCAPE_CODE.sub("", text))


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _bounded_int(text: str) -> int:
    if len(text) > 20 or abs(int(text)) > _INTEGER_MAX:
        raise ValueError("integer out of range")
    return int(text)


def _printable(message: str) -> str:
    printable = clean_text(message).strip()
    return printable if len(printable) <= _MESSAGE_MAX else "…" + printable[-_MESSAGE_MAX:]
