"""Settings of the whole suite."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

# Before numpy is imported: small matrices on many threads are slow on a busy machine.
for _variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

# The machine may be busy with other tests: an example that is slow once is no failure.
settings.register_profile("default", deadline=None)
# In CI the same examples each time: a change is judged by what it changes.
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def _skipped(session: pytest.Session) -> Sequence[pytest.TestReport]:
    """Tests that were skipped; none in a worker process, which reports to the one that started it."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    return reporter.stats.get("skipped", []) if reporter is not None else []


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail in CI when a test was skipped: what needs a GPU is deselected, the rest must run."""
    if os.environ.get("CI") and session.exitstatus == pytest.ExitCode.OK and _skipped(session):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the skipped tests in CI."""
    if os.environ.get("CI"):
        for report in terminalreporter.stats.get("skipped", []):
            terminalreporter.write_line(
                f"FAILED by being skipped: {report.nodeid} {report.longrepr}", red=True
            )
