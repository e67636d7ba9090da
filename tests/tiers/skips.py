"""Under CI a skipped test is a failed one, unless it has nothing to test on this machine.

A test that lacks a means (a right, a program, a package) calls `pytest.skip` while it runs, after
the harness has installed what it can: what is looked up at import is looked up too early. A test
whose case can't occur here calls `not_applicable`. A test that may fail (xfail) proves nothing and
is refused as well.
"""

import os
from collections.abc import Generator
from typing import Any, NoReturn

import pytest
from _pytest.outcomes import Skipped  # pytest exports it only as an attribute of pytest.skip


class NotApplicable(Skipped):
    """The skip of a test whose case can't occur on this machine."""


def not_applicable(reason: str) -> NoReturn:
    """Skip a test whose case can't occur on this machine, under CI as well."""
    raise NotApplicable(f"not applicable: {reason}")


def is_ci() -> bool:
    """Whether every test has to run: CI is set to anything but a word for no."""
    return os.environ.get("CI", "").strip().lower() not in ("", "0", "false", "no", "off")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[Any],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn the skip of a test into a failure."""
    report = yield
    if call.excinfo is None or not isinstance(call.excinfo.value, NotApplicable):
        _refuse(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn the skip of a module into a failure."""
    report = yield
    _refuse(report)
    return report


def _refuse(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Fail a report of a skip or of an expected failure."""
    if not report.skipped or not is_ci():
        return
    if hasattr(report, "wasxfail"):
        found = f"{report.nodeid}: expected to fail: {report.wasxfail}"
        del report.wasxfail
    elif isinstance(report.longrepr, tuple):
        file, line, said = report.longrepr
        found = f"{file}:{line}: skipped: {said.removeprefix('Skipped: ')}"
    else:
        return
    report.outcome = "failed"
    report.longrepr = (
        f"{found}. Under CI=true every test runs: provide what it needs, or call "
        "tests.tiers.skips.not_applicable if its case can't occur here."
    )
