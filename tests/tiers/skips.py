"""Under ``CI=true`` a skipped test is a failed one, unless it has nothing to test on this machine.

A test that lacks a means (a right, a program, a package) calls `pytest.skip` while it runs, after
the harness has installed what it can: what is looked up at import is looked up too early. A test
whose case can't occur here calls `not_applicable`.
"""

import os
from collections.abc import Generator
from typing import NoReturn

import pytest

_NOT_APPLICABLE = "not applicable: "


def not_applicable(reason: str) -> NoReturn:
    """Skip a test whose case can't occur on this machine, under ``CI=true`` as well."""
    pytest.skip(_NOT_APPLICABLE + reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn the skip of a test into a failure."""
    report = yield
    _refuse(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn the skip of a module into a failure."""
    report = yield
    _refuse(report)
    return report


def _refuse(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Fail a report of a skip whose reason is a missing means."""
    expected = hasattr(report, "wasxfail") or not report.skipped
    if expected or os.environ.get("CI") != "true" or not isinstance(report.longrepr, tuple):
        return
    file, line, said = report.longrepr
    reason = said.removeprefix("Skipped: ")
    if not reason.startswith(_NOT_APPLICABLE):
        report.outcome = "failed"
        report.longrepr = (
            f"{file}:{line}: skipped: {reason}. Under CI=true every test runs: provide what it "
            "needs, or call tests.tiers.skips.not_applicable if its case can't occur here."
        )
