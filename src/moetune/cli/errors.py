"""Errors for people and for machines: what is wrong, the next command, the exit code."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from typing import TYPE_CHECKING

import click

from moetune.cli.output import clean
from moetune.domain.errors import MoetuneError

if TYPE_CHECKING:
    from collections.abc import Sequence

ERROR_SCHEMA = "moetune.error/1"
COULD_NOT_RUN = 2
INTERRUPTED = 130


def report_error(error: Exception, arguments: Sequence[str]) -> int:
    """Print an error and return the exit code."""
    message, hint, code = _explain(error)
    if os.environ.get("MOETUNE_DEBUG"):
        traceback.print_exception(error)
    lines = error.lines if isinstance(error, MoetuneError) else ()
    _say("error", lines or (message,), hint)
    if "--json" in arguments:
        _say_json(type(error).__name__, message, hint)
    return code


def report_interrupt(arguments: Sequence[str]) -> int:
    """Say that a run was interrupted and which command starts it again."""
    hint = f"run it again: {shlex.join(['moetune', *arguments])}"
    _say("interrupted", ("nothing is left half written",), hint)
    return INTERRUPTED


def _explain(error: Exception) -> tuple[str, str | None, int]:
    if isinstance(error, MoetuneError):
        return error.message, error.hint, error.exit_code
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "moetune"
        return error.format_message(), f"{command} --help", COULD_NOT_RUN
    if isinstance(error, click.ClickException):
        return error.format_message(), None, COULD_NOT_RUN
    if isinstance(error, MemoryError):
        return "out of memory", None, COULD_NOT_RUN
    return (
        f"unexpected {type(error).__name__}: {error}",
        "this is a fault of moetune: run it again with MOETUNE_DEBUG=1 and report the traceback",
        COULD_NOT_RUN,
    )


def _say(label: str, messages: Sequence[str], hint: str | None) -> None:
    colored = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    prefix = click.style(f"{label}:", fg="red", bold=True) if colored else f"{label}:"
    try:
        for message in messages:
            # A message never breaks its line: what looks like a line of ours is one.
            sys.stderr.write(f"{prefix} {clean(message)}\n")
        if hint:
            sys.stderr.write(f"hint: {clean(hint)}\n")
        sys.stderr.flush()
    except OSError:
        return  # nowhere to say it: the exit code still tells


def _say_json(kind: str, message: str, hint: str | None) -> None:
    import json

    document = {"schema": ERROR_SCHEMA, "error": {"type": kind, "message": message, "hint": hint}}
    try:
        sys.stdout.write(json.dumps(document, indent=2, sort_keys=True) + "\n")
        sys.stdout.flush()
    except OSError:
        return
