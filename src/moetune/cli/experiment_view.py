"""What a person sees while an experiment runs: some lines that are written over, or one line a step."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from typing import TYPE_CHECKING

from moetune.cli.output import clean
from moetune.domain.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moetune.applications.experiments.progress import Progress
    from moetune.cli.output import Sink

_SHOWN_ARMS = 12
_UP_AND_CLEAR = "\x1b[{}A\x1b[J"


class View:
    """The live view; called with each moment of the experiment.

    On a terminal: which arm runs, starts left, time left, what is known of each arm. Elsewhere a line
    for each begin and end of a start.

    Args:
        sink: where notes go.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._on_terminal = sys.stderr.isatty()
        self._began = time.monotonic()
        self._height = 0

    def __call__(self, progress: Progress) -> None:
        """Show a moment; a terminal that is gone ends no experiment: its SIGHUP does, in order."""
        with contextlib.suppress(OSError, OutputError):
            self._show(progress)

    def _show(self, progress: Progress) -> None:
        if progress.begins:
            self._clear()
            self._sink.note(self._line(progress))
        if self._on_terminal:
            self._clear()
            self._draw(list(self._lines(progress)))

    def clear(self) -> None:
        """Make room for what comes next."""
        with contextlib.suppress(OSError):
            self._clear()

    def _clear(self) -> None:
        if self._height:
            sys.stderr.write(_UP_AND_CLEAR.format(self._height))
            sys.stderr.flush()
            self._height = 0

    def _line(self, progress: Progress) -> str:
        start = progress.start
        where = "" if start is None else f"block {start.block + 1}, {start.arm}: "
        return f"{time.monotonic() - self._began:8.1f} s  {where}{progress.said}"

    def _lines(self, progress: Progress) -> Iterator[str]:
        from moetune.applications.experiments.progress import spoken
        from moetune.applications.experiments.report import ratio_text

        start = progress.start
        if start is not None:
            yield f"  now      {start.arm}: {progress.said}"
        left = f"{progress.finished} finished, at most {progress.most_left} left"
        if progress.seconds_left is not None:
            left += f", {spoken(progress.seconds_left)}"
        yield f"  starts   {left}"
        for one in progress.known[:_SHOWN_ARMS]:
            ratio = ratio_text(one.comparisons[0]) if one.comparisons else ""
            decided = "" if one.decided else " so far"
            yield f"  {one.arm}: {one.verdict.value}{decided} {ratio}"

    def _draw(self, lines: list[str]) -> None:
        width = shutil.get_terminal_size().columns - 1
        # A line that wraps would take two: what is written over would no longer match.
        sys.stderr.write("".join(clean(line)[:width] + "\n" for line in lines))
        sys.stderr.flush()
        self._height = len(lines)
