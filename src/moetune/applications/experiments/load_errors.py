"""Why a pass of the load gives no numbers: a verdict for that start, the others go on."""

from __future__ import annotations

from moetune.domain.errors import InputError, MoetuneError


class LoadError(MoetuneError):
    """A load generator that failed, or numbers that cannot be used."""


class LoadCancelledError(LoadError):
    """The pass was to end before it was over."""


class LoadResultError(LoadError, InputError):
    """A result file that is missing, broken, or of other requests than were asked for."""
