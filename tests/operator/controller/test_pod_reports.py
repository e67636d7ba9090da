"""What pods say of themselves is read with care: their image is the user's."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace

import aiohttp
import pytest
from aiohttp import web

from kubelora_api.report import RunReport
from kubelora_api.schema import JsonObject
from kubelora_api.status import JobStatus, Progress
from kubelora_operator.controller.apply import without_reports
from kubelora_operator.controller.parsing import parse_status, status_problems
from kubelora_operator.controller.pod_reports import (
    fetch_report,
    parse_report,
    parse_termination_message,
)
from kubelora_operator.decision.decide import decide
from kubelora_operator.decision.snapshot import TrainerPod, Unreachable
from tests.operator.world import START, UID, make_snapshot

GOOD = {"runId": UID, "attempt": 1, "phase": "Training", "step": 7, "totalSteps": 10, "loss": 0.5}
POD = TrainerPod("p", "u", 1, address="127.0.0.9", running=True)


def test_a_report_is_read() -> None:
    report = parse_report(json.dumps(GOOD).encode(), UID, 1)
    assert isinstance(report, RunReport)
    assert (report.step, report.loss) == (7, 0.5)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b'{"runId": 1}',
        b"[" * 100_000,
        json.dumps(GOOD | {"runId": "someone else"}).encode(),
        json.dumps(GOOD | {"attempt": 2}).encode(),
        json.dumps(GOOD | {"step": 10**30}).encode(),
        json.dumps(GOOD | {"step": "12345678901234567890"}).encode(),
        json.dumps(GOOD | {"step": -1}).encode(),
        json.dumps(GOOD | {"step": True}).encode(),
        json.dumps(GOOD | {"loss": "inf"}).encode(),
        json.dumps(GOOD | {"secondsLeft": "nan"}).encode(),
    ],
)
def test_what_is_no_report_of_this_run_is_refused(body: bytes) -> None:
    assert isinstance(parse_report(body, UID, 1), Unreachable)


def test_numbers_that_a_status_can_not_hold_are_dropped() -> None:
    body = json.dumps(GOOD | {"loss": float("nan"), "gradNorm": float("inf")}).encode()
    report = parse_report(body.replace(b"0.5", b"1e999"), UID, 1)
    assert isinstance(report, RunReport)
    assert (report.loss, report.grad_norm) == (None, None)


def test_a_final_report_is_read_and_anything_else_is_last_words() -> None:
    final, words = parse_termination_message(
        json.dumps({"runId": UID, "attempt": 1, "exitCode": 2, "message": "no images"}), UID, 1
    )
    assert final is not None
    assert (final.exit_code, final.message, words) == (2, "no images", "")
    assert parse_termination_message("Traceback\nValueError: x", UID, 1) == (
        None,
        "Traceback\nValueError: x",
    )
    assert parse_termination_message("a" * 5000, UID, 1)[1] == "…" + "a" * 600


def test_what_a_terminal_would_obey_is_taken_out_of_messages() -> None:
    hostile = "\x1b[31mred\x1b[0m \x1b]0;title\x07a\x00b\x9bc\u202ed"
    message = json.dumps({"runId": UID, "attempt": 1, "exitCode": 2, "message": hostile})
    final, _ = parse_termination_message(message, UID, 1)
    assert final is not None
    assert final.message == "red a b c d"
    assert parse_termination_message(hostile, UID, 1) == (None, "red a b c d")


def test_a_final_report_with_hostile_numbers_is_last_words_only() -> None:
    hostile = json.dumps({"runId": UID, "attempt": 1, "exitCode": 0, "message": "", "loss": "inf"})
    assert parse_termination_message(hostile, UID, 1)[0] is None


def test_a_refused_report_leaves_what_the_operator_decided() -> None:
    old = JobStatus(attempt=1, progress=Progress(step=3))
    decided = JobStatus(attempt=1, state="Complete", progress=Progress(step=100))
    plain = without_reports(decided, old)
    assert (plain.state, plain.progress) == ("Complete", Progress(step=3))


def status_of_a_newer_operator() -> JsonObject:
    condition = {"type": "Complete", "status": "Paused", "reason": "X", "message": ""}
    condition["lastTransitionTime"] = "2026-03-01T12:00:00Z"
    return {"status": {"attempt": 2, "conditions": [condition]}}


def test_a_status_that_a_newer_operator_wrote_is_kept_and_not_acted_on() -> None:
    document = status_of_a_newer_operator()
    problems = status_problems(document)
    status = parse_status(document)
    plan = decide(make_snapshot(status=status, status_problems=problems), START)
    assert (plan.status, plan.create, plan.delete) == (status, None, ())
    (event,) = plan.events
    assert (event.type, event.reason) == ("Warning", "StatusUnreadable")
    assert "can't read status.conditions.0.status: Input should be 'True'" in event.message
    assert status_problems({}) == status_problems({"status": None}) == ()


@pytest.fixture
async def pod_server() -> AsyncIterator[dict[str, web.StreamResponse]]:
    """A real HTTP server at the pod's address, which answers what the test puts in."""
    answers: dict[str, web.StreamResponse] = {}

    async def answer(_: web.Request) -> web.StreamResponse:
        return answers["status"]

    app = web.Application()
    app.router.add_get("/status", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.9", 9464).start()
    yield answers
    await runner.cleanup()


async def test_a_pod_is_asked_over_http(pod_server: dict[str, web.StreamResponse]) -> None:
    pod_server["status"] = web.json_response(GOOD)
    async with aiohttp.ClientSession() as session:
        report = await fetch_report(session, POD, UID)
    assert isinstance(report, RunReport)
    assert report.step == 7


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (lambda: web.Response(status=302, headers={"Location": "http://10.0.0.1/"}), "HTTP 302"),
        (lambda: web.Response(status=500), "HTTP 500"),
        (lambda: web.Response(body=b"x" * 300_000), "more than 262144 bytes"),
    ],
)
async def test_redirects_errors_and_floods_are_not_followed(
    pod_server: dict[str, web.StreamResponse], answer: object, cause: str
) -> None:
    assert callable(answer)
    pod_server["status"] = answer()
    async with aiohttp.ClientSession() as session:
        report = await fetch_report(session, POD, UID)
    assert isinstance(report, Unreachable)
    assert cause in report.message


async def test_a_pod_that_does_not_listen_is_unreachable() -> None:
    async with aiohttp.ClientSession() as session:
        report = await fetch_report(session, replace(POD, address="127.0.0.10"), UID)
        nowhere = await fetch_report(session, replace(POD, address=None), UID)
    assert isinstance(report, Unreachable)
    assert isinstance(nowhere, Unreachable)
