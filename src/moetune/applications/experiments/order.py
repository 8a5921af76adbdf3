"""What a supervisor is told: what to start, where its log goes, how it is ended."""

from __future__ import annotations

from dataclasses import dataclass

from moetune.applications.experiments.log_file import LIMITS, LogLimits
from moetune.applications.experiments.start_record import StartRecord

STOP = b"stop\n"
"""Line that asks for the end, here and at the far end of an ssh connection."""
BEAT = b"beat\n"
"""Line that says that this end of an ssh connection is there."""


@dataclass(frozen=True, slots=True)
class Order:
    """What to start and how to end it; it holds secrets and is never written anywhere.

    Attributes:
        run: folder of the run, where the record lies.
        record: of the start, without the ids.
        arguments: of the server's process.
        environment: of it, all of it.
        folder: its working directory.
        log: file of the server's log.
        command_log: file of what the command prints when the log comes from elsewhere, else empty.
        pipe: named pipe into which the server writes its log itself, empty when it prints it.
        limits: of the log.
        stop: arguments of the command that stops the server.
        logs: arguments of the command that prints its log.
        secrets: values that the log must not hold.
        script: what an ssh connection is to run at its far end, empty for a server of this machine.
        nonce: word before what the far end says of itself.
        beat_s: time between two signs of life to the far end.
    """

    run: str
    record: StartRecord
    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    folder: str
    log: str
    command_log: str = ""
    pipe: str = ""
    limits: LogLimits = LIMITS
    stop: tuple[str, ...] = ()
    logs: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    script: str = ""
    nonce: str = ""
    beat_s: float = 15.0
