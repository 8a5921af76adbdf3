"""Errors that a person reads: what is wrong, with what, and the next command."""

from __future__ import annotations


class MoetuneError(Exception):
    """Something could not run.

    Args:
        message: what is wrong, and with what.
        hint: what to do next, preferably a command to paste.
    """

    exit_code = 2
    lines: tuple[str, ...] = ()
    """The message in parts that each want a line of their own; none: it is one."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InputError(MoetuneError):
    """Input that cannot be read or that contradicts itself."""


class ModelError(InputError):
    """A checkpoint that is unknown, unreachable, not a Mixture-of-Experts, or ambiguous."""


class ShardingError(InputError):
    """A parallelism that does not divide the expert layer."""


class UnknownGpuError(InputError):
    """A GPU name that the registry lacks and for which no compute capability was given."""


class ServerError(InputError):
    """A server, version or dtype that has no rule here."""


class ConfigFileError(InputError):
    """A config file that the server's loader would refuse, or that is no config file."""


class OutputError(MoetuneError):
    """An output place that cannot be written."""
