"""What pods say of themselves: the body of ``GET /status`` and the termination message.

A pod runs an image of the user's choice, so nothing it says is trusted: sizes and times are
bounded, redirects are not followed, numbers that a status can't hold are dropped, and the report
must be about this run.
"""

import asyncio
import json
import math
from typing import Final

import aiohttp
from pydantic import ValidationError

from kubelora_api import names
from kubelora_api.report import FinalReport, RunReport
from kubelora_operator.decision.snapshot import TrainerPod, Unreachable

_TIMEOUT: Final = 3.0
_BODY_MAX: Final = 256 * 1024
_WHOLE_MAX: Final = 2**53
_WORDS_MAX: Final = 600


async def ask(
    session: aiohttp.ClientSession, pod: TrainerPod, run_id: str
) -> RunReport | Unreachable:
    """Ask a running pod how far it is."""
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
    return read_report(body, run_id, pod.attempt)


def read_report(body: bytes, run_id: str, attempt: int) -> RunReport | Unreachable:
    """The report in a body; Unreachable where it is none, or is about another run."""
    try:
        report = RunReport.model_validate(_parse(body))
    except (ValueError, ValidationError, RecursionError):
        return Unreachable("the answer is no report of a KubeLoRA trainer")
    if report.run_id != run_id or report.attempt != attempt:
        return Unreachable(
            f"the answer is about run {report.run_id[:64]}, attempt {report.attempt}, not this one"
        )
    return report


def read_final(message: str, run_id: str, attempt: int) -> tuple[FinalReport | None, str]:
    """The final report in a termination message, or else its last words for a person to read."""
    try:
        final = FinalReport.model_validate(_parse(message.encode()))
    except (ValueError, ValidationError, RecursionError):
        return None, _words(message)
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
    """JSON whose numbers fit a status: NaN and infinities become null, huge integers an error."""
    return json.loads(
        body, parse_constant=lambda _: None, parse_float=_finite, parse_int=_bounded_int
    )


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _bounded_int(text: str) -> int:
    if len(text) > 20 or abs(int(text)) > _WHOLE_MAX:
        raise ValueError("a number too large to be meant")
    return int(text)


def _words(message: str) -> str:
    printable = "".join(c if c.isprintable() or c == "\n" else " " for c in message).strip()
    return printable if len(printable) <= _WORDS_MAX else "…" + printable[-_WORDS_MAX:]
