"""What a plan says as a whole: faults that no single value shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from moetune.applications.experiments.command_line import arm_command
from moetune.applications.experiments.generators import check_arguments
from moetune.applications.experiments.load_errors import LoadError
from moetune.applications.experiments.plan_lines import Place
from moetune.domain.errors import InputError
from moetune.domain.experiment import LoadResult, ServerFacts
from moetune.domain.experiment_plan import (
    BASELINE,
    COMBINED,
    Budget,
    DecisionPlan,
    Intervention,
    LoadPlan,
    ServerPlan,
)
from moetune.servers.command_options import last_values, options_of

RESERVED = (BASELINE, COMBINED)
# What the other numbers of a pass follow from: throughputs are these over the duration.
REQUIRED_RESULTS = ("completed", "duration_s", "output_tokens")
_DERIVED = frozenset({"output_tokens_per_s", "requests_per_s"})
_RESULT_FIELDS = tuple(item.name for item in fields(LoadResult))
_RESULT_PLACE = re.compile(
    r"[^\s.]{1,128}(?:\.[^\s.]{1,128}){0,15}(?: [*/] (?:\d{1,12}(?:\.\d{1,12})?|\.\d{1,12}))?"
)
_CHANGEABLE = frozenset(item.name for item in fields(ServerFacts)) - {"server", "lines"}
_KINDS_OF_CHANGE = ("argument ", "other ")

Fault = tuple[Place, str]


@dataclass(frozen=True, slots=True)
class Read:
    """A plan as far as it could be read: None is what has faults of its own.

    Attributes:
        interventions: what was read of each, and whether that is all of it.
    """

    server: ServerPlan | None
    load: LoadPlan | None
    budget: Budget | None
    decision: DecisionPlan | None
    interventions: tuple[tuple[Intervention, bool], ...]


def check_meaning(read: Read) -> Iterator[Fault]:
    """Places and messages of what contradicts itself, in all that is right by itself."""
    if read.server is not None:
        yield from _server(read.server)
    if read.load is not None:
        yield from _load(read.load, read.decision.metric if read.decision else "")
    if read.decision is not None and read.decision.smallest_effect <= read.decision.margin:
        yield (
            ("decision", "smallest_effect"),
            f"is {read.decision.smallest_effect:g}, and has to be over the margin of "
            f"{read.decision.margin:g}: a change within the margin counts as none",
        )
    if read.budget is not None and read.budget.starts == 1:
        yield ("budget", "starts"), "is 1, and an arm needs a start of the baseline and one of its own"
    yield from _names(read)
    for position, (one, whole) in enumerate(read.interventions):
        if whole:
            for place, message in _intervention(one):
                yield ("intervention", position, *place), message
    if read.server is not None:
        yield from _effects(read.server, read.interventions)


def _server(server: ServerPlan) -> Iterator[Fault]:
    if server.stop and not server.stop[0]:
        yield ("server", "stop", 0), "is empty, and has to be a program"
    if server.logs and not server.logs[0]:
        yield ("server", "logs", 0), "is empty, and has to be a program"
    if not server.command[0]:
        yield ("server", "command", 0), "is empty, and has to be a program"
    if len(set(server.gpus)) < len(server.gpus):
        yield ("server", "gpus"), "names a GPU twice"


def _load(load: LoadPlan, metric: str) -> Iterator[Fault]:
    if load.concurrency > load.requests:
        yield (
            ("load", "concurrency"),
            f"is {load.concurrency}, more than the {load.requests} requests of a pass",
        )
    if load.generator != "command":
        if load.result:
            yield (
                ("load", "result"),
                f'is for generator = "command"; moetune knows what {load.generator} writes',
            )
        try:
            check_arguments(load)
        except LoadError as error:
            yield ("load", "arguments"), error.message.removeprefix("load.arguments ")
        return
    if not load.command or not load.command[0]:
        yield ("load", "command"), 'is missing: generator = "command" needs the arguments that start it'
    elif not any("{result}" in word for word in (*load.command, *load.arguments)):
        yield ("load", "command"), "has no {result}, the file that it has to write"
    yield from _result(load, metric)


def _result(load: LoadPlan, metric: str) -> Iterator[Fault]:
    if not load.result:
        yield (
            ("load", "result"),
            'is missing: generator = "command" needs a table [load.result] that says where '
            f"{', '.join(REQUIRED_RESULTS)} and what else it measures stand in the file",
        )
        return
    for name, where in load.result.items():
        if name not in _RESULT_FIELDS:
            yield (
                ("load", "result", name),
                f"is nothing that is measured; known are {', '.join(_RESULT_FIELDS)}",
            )
        if not _RESULT_PLACE.fullmatch(where):
            yield (
                ("load", "result", name),
                "has to be dotted names with an optional factor, as in metrics.ttft.p50 * 1000",
            )
    missing = [name for name in REQUIRED_RESULTS if name not in load.result]
    if missing:
        yield ("load", "result"), f"does not say where {', '.join(missing)} stand in the file"
    if metric and metric not in load.result and metric not in _DERIVED:
        yield ("load", "result"), f"does not say where {metric} stands, which decides"


def _names(read: Read) -> Iterator[Fault]:
    names: dict[str, Intervention] = {}
    for position, (one, _) in enumerate(read.interventions):
        name = one.name.strip().casefold()
        place: Place = ("intervention", position, "name")
        if name in RESERVED:
            yield place, f'"{one.name}" is the name of an arm of moetune\'s own'
        if name in names:
            yield place, f'"{one.name}" is also the name of the one in line {names[name].line}'
        if name:
            names.setdefault(name, one)


def _intervention(one: Intervention) -> Iterator[Fault]:
    if one.configs and one.without_configs:
        yield ("without_configs",), "takes the config files away that configs puts in place"
    for position, name in enumerate(one.may_change):
        if name not in _CHANGEABLE and not name.startswith(_KINDS_OF_CHANGE):
            yield (
                ("may_change", position),
                f'"{name}" is no fact; known are {", ".join(sorted(_CHANGEABLE))}, and argument NAME',
            )


def _effects(server: ServerPlan, interventions: tuple[tuple[Intervention, bool], ...]) -> Iterator[Fault]:
    """Interventions that do not fit the command, that change nothing, or the same as another."""
    nothing = _effect(server, Intervention(""))
    seen: dict[object, Intervention] = {}
    for position, (one, whole) in enumerate(interventions):
        if not whole:
            continue
        place: Place = ("intervention", position)
        try:
            effect = _effect(server, one)
        except InputError as error:
            hint = f"; {error.hint}" if error.hint else ""
            yield place, f"{error.message.partition('): ')[2] or error.message}{hint}"
            continue
        if effect == nothing:
            yield place, f'"{one.name}" changes nothing of the server'
        elif effect in seen:
            yield place, f'does the same as "{seen[effect].name}" in line {seen[effect].line}'
        seen.setdefault(effect, one)


def _effect(server: ServerPlan, one: Intervention) -> tuple[object, ...]:
    """What an arm runs, so that two ways to write one thing are equal.

    Raises:
        InputError: for an intervention that does not fit the command.
    """
    # The files are compared by their paths: reading what a plan names is for later.
    command = arm_command(server, (replace(one, configs=(), without_configs=False),))
    return (
        frozenset(options_of(command.arguments)),
        frozenset(last_values(command.arguments).items()),
        frozenset(command.environment.items()),
        frozenset(one.configs),
        one.without_configs,
    )
