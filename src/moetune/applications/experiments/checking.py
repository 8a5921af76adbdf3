"""What is known of a plan before anything is started: what is refused, and what a person should know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moetune.applications.checkpoints import resolve
from moetune.applications.experiments.plan_checks import check_plan, command_facts
from moetune.applications.nvml import detect_gpus
from moetune.domain.errors import InputError, MoetuneError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moetune.applications.experiments.known_good import ConfigArms
    from moetune.domain.experiment_plan import Plan
    from moetune.domain.gpu import Gpu
    from moetune.domain.model import ExpertLayer


@dataclass(frozen=True, slots=True)
class Checked:
    """What is known of a plan.

    Attributes:
        refused: interventions that are never started, and why.
        problems: what a person should know, with the plan's lines.
    """

    refused: tuple[tuple[str, str], ...]
    problems: tuple[str, ...]


def check(plan: Plan, configs: ConfigArms, version: str = "") -> Checked:
    """Check a plan against the table of flags, the GPU, the model, and the places of its config files.

    Args:
        plan: the experiment.
        configs: what would put config files in place.
        version: release of the server, where the plan leaves it to the log and a start has shown it.

    Raises:
        InputError: when the baseline itself cannot run.
    """
    found = check_plan(plan, version=version, gpu=_gpu(plan), layer=_layer(plan))
    errors = [one for one in found if one.severity == "error"]
    for one in errors:
        if not one.intervention:
            raise InputError(one.message, one.hint)
    refused = _first((one.intervention, one.message) for one in errors)
    refused += _cannot_install(plan, configs, {name for name, _ in refused})
    problems = tuple(str(one) for one in found if one.severity != "error")
    return Checked(refused, problems)


def model_of(plan: Plan) -> str:
    """The model as the server is asked for it."""
    try:
        return command_facts(plan.server).model
    except InputError:
        return plan.server.model


def _first(pairs: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    found: dict[str, str] = {}
    for name, reason in pairs:
        found.setdefault(name, reason)
    return tuple(found.items())


def _cannot_install(plan: Plan, configs: ConfigArms, refused: set[str]) -> tuple[tuple[str, str], ...]:
    """Interventions whose files cannot be put in place."""
    found = []
    for one in plan.interventions:
        if one.name in refused:
            continue
        try:
            configs.check(one)
        except MoetuneError as error:
            found.append((one.name, error.message))
    return tuple(found)


def _gpu(plan: Plan) -> Gpu | None:
    """What is here, where the plan names no GPU and the server runs here."""
    if plan.server.gpu or plan.server.host:
        return None
    devices = [one for one in detect_gpus().devices if not plan.server.gpus or one.index in plan.server.gpus]
    try:
        return devices[0].gpu if devices else None
    except MoetuneError:
        return None


def _layer(plan: Plan) -> ExpertLayer | None:
    """The model's expert layer where it is known without the network."""
    model = model_of(plan)
    try:
        return resolve(model, offline=True) if model else None
    except MoetuneError:
        return None
