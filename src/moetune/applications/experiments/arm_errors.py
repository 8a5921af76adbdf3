"""Why an arm cannot run or cannot be ended: each is a verdict for that arm, the others go on."""

from __future__ import annotations

from moetune.domain.errors import MoetuneError


class ArmError(MoetuneError):
    """A server of an experiment that does not do what it should."""


class CannotStartError(ArmError):
    """It was never started, or died before it was ready."""


class NeverReadyError(ArmError):
    """It runs and does not answer as one that takes requests."""


class CannotStopError(ArmError):
    """It is gone or not, and something of it is left: processes, or memory of a GPU."""


class PortKeptError(CannotStopError):
    """Its port is not free again."""


class ForeignProcessError(ArmError):
    """Somebody else's process computes on a GPU that the experiment needs."""


class StartCancelledError(ArmError):
    """Nobody waits for it any more."""
