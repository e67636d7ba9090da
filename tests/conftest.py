"""The rule about skipped tests, for every room."""

from tests.tiers.skips import pytest_make_collect_report, pytest_runtest_makereport

__all__ = ["pytest_make_collect_report", "pytest_runtest_makereport"]
