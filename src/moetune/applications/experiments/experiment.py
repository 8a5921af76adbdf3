"""`moetune experiment` from a plan's file to a report: what is checked, opened and handed to the loop."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.applications.experiments.arm_server import ArmServer
from moetune.applications.experiments.caches import needs_preparing
from moetune.applications.experiments.checking import check, model_of
from moetune.applications.experiments.command_line import arm_command
from moetune.applications.experiments.facts import read_facts
from moetune.applications.experiments.far_configs import FarConfigs
from moetune.applications.experiments.generators import load_of_pass
from moetune.applications.experiments.interrupts import Interrupts
from moetune.applications.experiments.known_good import ConfigArms
from moetune.applications.experiments.load import run_pass
from moetune.applications.experiments.one_start import RunningServer, Tools
from moetune.applications.experiments.outlook import Outlook, outlook_of
from moetune.applications.experiments.plan_file import read_plan
from moetune.applications.experiments.progress import Progress
from moetune.applications.experiments.record import FOLDER, Record, config_digests, experiment_id, look
from moetune.applications.experiments.report import Report, report_of
from moetune.applications.experiments.running import Experiment
from moetune.applications.experiments.size import preparing_starts, size_of
from moetune.applications.experiments.taking_back import end_leftovers
from moetune.applications.state import state_path
from moetune.domain.errors import MoetuneError

if TYPE_CHECKING:
    from moetune.domain.experiment import LoadResult, ServerFacts
    from moetune.domain.experiment_plan import Intervention, Plan


CACHES = "caches"
"""Folder of a run with the compiled kernels of its arms."""


def real_tools(model: str) -> Tools:
    """Tools that start processes."""

    def start(plan: Plan, interventions: Sequence[Intervention], folder: Path, name: str) -> RunningServer:
        command = arm_command(plan.server, interventions)
        return ArmServer.start(plan.server, command, folder, name=name, caches=folder / CACHES)

    def load(
        plan: Plan, url: str, folder: Path, name: str, number: int, cancelled: Callable[[], bool]
    ) -> LoadResult:
        return run_pass(load_of_pass(plan.load, number), url, model, folder, name, cancelled)

    def facts(plan: Plan, log: Path, url: str | None, texts: Sequence[str]) -> ServerFacts:
        return read_facts(plan.server.name, log, url, texts)

    return Tools(start, load, facts, time.monotonic, time.time)


def run_experiment(
    path: Path, state: Path | None, environ: Mapping[str, str], show: Callable[[Progress], None]
) -> Report:
    """Run a plan, or go on with it, and report.

    Args:
        path: of the plan.
        state: the state directory; None: MOETUNE_STATE, else the XDG state directory.
        environ: variables of this process.
        show: told where the experiment is.

    Raises:
        KeyboardInterrupt: when it was interrupted: nothing runs, and the config files are as before.
        MoetuneError: when it cannot run.
    """
    where = state_path(state, environ)
    plan = read_plan(path)
    with Record.open(where, plan, environ, _digests(plan)) as record, Interrupts() as interrupts:
        configs = ConfigArms(plan, record.folder, environ)
        record.add("called", plan=str(path.absolute()))
        for text in end_leftovers(record.folder):
            show(Progress(f"an interrupted call had left a server, which was ended: {text}", begins=True))
        if configs.take_back():
            show(Progress("the config files of an interrupted arm were taken back", begins=True))
        checked = check(plan, configs)
        for problem in checked.problems:
            show(Progress(problem, begins=True))
        experiment = Experiment(
            plan,
            record,
            where,
            configs,
            FarConfigs(plan.server, record),
            real_tools(model_of(plan)),
            interrupts,
            show,
            lambda version: check(plan, configs, version).refused,
            lambda interventions: _needs_preparing(plan, record.folder, interventions),
        )
        try:
            experiment.run()
        except KeyboardInterrupt:
            said = (
                f"{len(record.facts.starts)} starts are finished; nothing runs, and the files are as before"
            )
            show(Progress(said, begins=True))
            raise
        if record.facts.done:
            shutil.rmtree(record.folder / CACHES, ignore_errors=True)
        return report_of(plan, record.id, record.folder, record.facts)


def look_ahead(path: Path, state: Path | None, environ: Mapping[str, str]) -> Outlook:
    """What a plan would do; nothing is started or changed.

    Raises:
        MoetuneError: when it could not run.
    """
    where = state_path(state, environ)
    plan = read_plan(path)
    name = experiment_id(plan, _digests(plan))
    folder = where / FOLDER / name
    checked = check(plan, ConfigArms(plan, folder, environ))
    refused = checked.refused
    try:
        finished = look(where, name).facts.starts
    except MoetuneError:
        finished = []  # it was never begun
    out = {intervention for intervention, _ in refused}
    tried = [one for one in plan.interventions if one.name not in out]
    filled = any(one.preparing for one in finished)
    caches = filled or any(_needs_preparing(plan, folder, (one,)) for one in tried)
    preparing = preparing_starts(len(tried), caches=caches)
    size = size_of(plan, len(tried), preparing)
    return outlook_of(plan, name, refused, checked.problems, size, preparing, finished)


def _digests(plan: Plan) -> dict[str, str]:
    return config_digests([path for one in plan.interventions for path in one.configs])


def _needs_preparing(plan: Plan, folder: Path, interventions: Sequence[Intervention]) -> bool:
    return needs_preparing(arm_command(plan.server, interventions), folder / CACHES)
