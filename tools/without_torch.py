"""A pytest plugin (`pytest -p tools.without_torch`): without torch, what needs it is skipped, all else runs."""

from __future__ import annotations

from collections.abc import Generator

import pytest

REASON = "needs torch"
_MISSING = "No module named 'torch"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module that cannot be imported for want of torch is skipped."""
    report = yield
    if report.failed and _MISSING in str(report.longrepr):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: {REASON}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """A fixture that imports torch skips its test."""
    try:
        return (yield)
    except ModuleNotFoundError as error:
        _skip(error)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """So does a test that imports it when it runs."""
    try:
        return (yield)
    except ModuleNotFoundError as error:
        _skip(error)
        raise


def _skip(error: ModuleNotFoundError) -> None:
    if (error.name or "").partition(".")[0] == "torch":
        pytest.skip(REASON)
