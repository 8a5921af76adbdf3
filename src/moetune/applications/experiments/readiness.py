"""When a server takes requests: its endpoint answers 200, and its log says so where the plan names a text."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moetune.applications.experiments.endpoint import ask
from moetune.applications.experiments.log_file import TextSearch
from moetune.applications.experiments.ports import listens
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_OK = 200
_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0
ANSWER_S = 5.0
"""A health check may run a request of one token."""


@dataclass(slots=True)
class Readiness:
    """Whether one start is ready.

    Attributes:
        url: of the server, on this machine.
        path: of its endpoint.
        log: its log.
        text: that the log has to hold, empty: the endpoint decides alone.
        answer_s: time limit of one answer.
        last: why it was not ready when it was last asked.
    """

    url: str
    path: str
    log: Path
    text: str = ""
    answer_s: float = field(default_factory=lambda: ANSWER_S)
    last: str = ""
    _search: TextSearch = field(init=False)

    def __post_init__(self) -> None:
        self._search = TextSearch(self.log, self.text)

    def look(self) -> bool:
        """Whether it is ready now."""
        if not self._search.found():
            self.last = f'its log does not say "{printable(self.text, 80)}"'
            return False
        answer = ask(self.url, self.path, self.answer_s)
        if answer is None:
            port = int(self.url.rpartition(":")[2])
            self.last = (
                f"{self.path} gives no whole answer within {self.answer_s:g} s"
                if listens(port)
                else f"nothing listens on port {port}"
            )
        elif answer.status != _OK:
            self.last = f"{self.path} answers {answer.status}"
        return answer is not None and answer.status == _OK


def wait_until_ready(readiness: Readiness, limit_s: float, over: Callable[[], bool]) -> float | None:
    """Wait until a server is ready, by a clock that never jumps.

    Args:
        readiness: what to look at.
        limit_s: how long.
        over: whether there is nothing to wait for any more; asked before each look.

    Returns:
        How long it took in seconds, None when it did not get ready.
    """
    began = time.monotonic()
    pause = _PAUSE_S
    while not over():
        if readiness.look():
            return time.monotonic() - began
        left = began + limit_s - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(pause, left))
        # Often at first, for a small server; a large one is not disturbed by questions while it loads.
        pause = min(pause * 1.2, _LONGEST_PAUSE_S)
    return None
