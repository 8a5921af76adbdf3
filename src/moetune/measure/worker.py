"""The measuring process: holds one GPU, answers one request a line, and dies rather than lie.

`python -m moetune.measure.worker UUID` is started in an environment with torch and Triton, which need
not be that of the process that asks. What a candidate breaks, it breaks here.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from moetune.domain.codec import to_json
from moetune.domain.errors import MoetuneError
from moetune.domain.text import printable
from moetune.measure.child import open_answers, say
from moetune.measure.protocol import (
    REQUESTS,
    Checked,
    CheckTask,
    DeviceFacts,
    Failure,
    FailureKind,
    LayerTask,
    LayerTimed,
    Opened,
    Peaks,
    PeakTask,
    Timed,
    TimeTask,
    Workload,
    read_request,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_MESSAGE_CHARACTERS = 300
_MEMORY_ERRORS = frozenset({"OutOfMemoryError", "MemoryError"})


class Backend(Protocol):
    """What measures: the GPU, or what stands for it in tests."""

    def facts(self) -> DeviceFacts:
        """The GPU and the software."""
        ...

    def healthy(self) -> bool:
        """Whether the context still works: False after an error that stays."""
        ...

    def open(self, workload: Workload) -> Opened:
        """Make room for a problem, in place of the one before."""
        ...

    def time(self, task: TimeTask) -> Timed:
        """Time one binary."""
        ...

    def layer(self, task: LayerTask) -> LayerTimed:
        """Time pairs through the layer."""
        ...

    def check(self, task: CheckTask) -> Checked:
        """Compare with the reference."""
        ...

    def peaks(self, task: PeakTask) -> Peaks:
        """Rates of the GPU."""
        ...


class ConfigError(Exception):
    """A candidate that cannot be measured, by its own fault."""


class SetupError(Exception):
    """This environment, or this problem on this GPU, cannot be measured at all."""


def serve(backend: Backend, requests: TextIO, answers: TextIO) -> None:
    """Say hello, then answer until there are no more requests or the context is lost."""
    say(answers, {"hello": to_json(backend.facts())})
    for line in requests:
        document = json.loads(line)
        try:
            operation: Callable[[Any], object] = getattr(backend, _operation(document))
            answer = {"ok": to_json(operation(read_request(document)))}
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told to who asked
            failure = _failure(error, backend)
            say(answers, {"failure": to_json(failure)})
            if failure.kind is FailureKind.DEVICE:
                return
            continue
        say(answers, answer)


def _operation(document: dict[str, Any]) -> str:
    name = document["op"]
    if name not in REQUESTS:
        raise SetupError(f"no operation is called {printable(str(name), 40)!r}")
    return str(name)


def _failure(error: Exception, backend: Backend) -> Failure:
    names = {kind.__name__ for kind in type(error).__mro__}
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    message = printable(f"{type(error).__name__}: {lines[0]}", _MESSAGE_CHARACTERS)
    if names & _MEMORY_ERRORS:
        kind = FailureKind.MEMORY
    elif not backend.healthy():
        kind = FailureKind.DEVICE
    elif isinstance(error, (SetupError, MoetuneError)):
        kind = FailureKind.SETUP
    else:
        kind = FailureKind.CONFIG
    return Failure(kind, message)


def run(make_backend: Callable[[], Backend]) -> None:
    """Serve on stdin and stdout; whatever else prints goes to stderr."""
    answers = open_answers()
    try:
        backend = make_backend()
    except Exception as error:  # noqa: BLE001 - told to who asked
        message = printable(f"{type(error).__name__}: {error}", _MESSAGE_CHARACTERS)
        say(answers, {"failure": to_json(Failure(FailureKind.SETUP, message))})
        return
    serve(backend, sys.stdin, answers)


def _gpu_backend() -> Backend:
    from moetune.measure.layer import GpuBackend

    return GpuBackend()


if __name__ == "__main__":
    run(_gpu_backend)
