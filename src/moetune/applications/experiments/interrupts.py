"""Ctrl-C and its like: told to the loop, which ends in order, instead of striking anywhere."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Remembers that an end was asked for. Use it as a context manager.

    A server that is just being stopped or a file that is just being put back is not left half done: the
    steps between ask `check`, waiting asks `cancelled`. SIGHUP is what a closed terminal sends.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        # Only the main thread may, and gets signals at all.
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # One that is ignored stays so: `nohup` has SIGHUP ignored.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def cancelled(self) -> bool:
        """Whether an end was asked for."""
        return self._asked

    def check(self) -> None:
        """End here when that was asked for.

        Raises:
            KeyboardInterrupt: then.
        """
        if self._asked:
            raise KeyboardInterrupt

    def _ask(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._asked = True
