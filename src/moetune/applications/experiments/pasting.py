"""The command of an arm as a person would paste it: moetune prints flags, and edits no script."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from moetune.applications.experiments.command_line import arm_command
from moetune.applications.experiments.redaction import redacted_arguments, redacted_variables

if TYPE_CHECKING:
    from moetune.domain.experiment_plan import Intervention, ServerPlan


def pasteable(server: ServerPlan, interventions: Sequence[Intervention]) -> str:
    """The command of an arm with its variables, quoted for a shell, without secrets.

    `{port}` is the plan's port; `{log}` and `{cache}`, which are a start's own, stay.

    Raises:
        InputError: for interventions that cannot be on together.
    """
    command = arm_command(server, interventions, server.port)
    here = with_variables(redacted_arguments(command.arguments), redacted_variables(command.environment))
    if not server.host:
        return here
    inside = f"cd {shlex.quote(server.folder)} && {here}" if server.folder else here
    return shlex.join(["ssh", server.host, inside])


def with_variables(arguments: Sequence[str], variables: Mapping[str, str]) -> str:
    """A command for a shell; a variable with an empty value is taken out."""
    unset = [word for name, value in variables.items() if not value for word in ("-u", name)]
    given = [f"{name}={value}" for name, value in variables.items() if value]
    return shlex.join([*(["env", *unset, *given] if unset or given else []), *arguments])
