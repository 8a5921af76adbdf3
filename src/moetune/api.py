"""The Python interface: the verbs of the command line as functions.

A verb takes what its request takes, and answers with a frozen dataclass whose `to_json()` is the document of
`--json`. Nothing is printed, nobody is asked; what cannot be done is a MoetuneError.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

from moetune.applications.borrow import borrow as _borrow
from moetune.applications.borrow_answer import Borrow, BorrowRequest
from moetune.applications.doctor import Diagnosis
from moetune.applications.doctor_machine import Machine, inspect_machine
from moetune.applications.doctor_request import DoctorRequest, diagnose_request
from moetune.applications.experiments.experiment import look_ahead, run_experiment
from moetune.applications.experiments.outlook import Outlook
from moetune.applications.experiments.progress import Progress
from moetune.applications.experiments.report import Report
from moetune.applications.experiments.taking_back import TakenBack
from moetune.applications.experiments.taking_back import take_experiment_back as _take_back
from moetune.applications.install_plan import InstallRequest, Prepared, prepare_install
from moetune.applications.installing import Installed
from moetune.applications.installing import install as _install
from moetune.applications.installs import Status
from moetune.applications.installs import status as _status
from moetune.applications.lint import lint as _lint
from moetune.applications.lint_report import Linted, LintRequest
from moetune.applications.measure_request import MeasureRequest
from moetune.applications.measured_answer import MeasuredTuning
from moetune.applications.planning import Plan, make_plan
from moetune.applications.replay import Replay
from moetune.applications.replay import replay as _replay
from moetune.applications.request import Request, TuneRequest
from moetune.applications.routing_inspection import RoutingAnswer, RoutingRequest
from moetune.applications.routing_inspection import inspect as _routing
from moetune.applications.state import state_path
from moetune.applications.tuning import Tuned, tune_request
from moetune.applications.tuning_measured import tune_measured as _tune_measured
from moetune.applications.uninstalling import Uninstalled, UninstallRequest
from moetune.applications.uninstalling import uninstall as _uninstall
from moetune.applications.verify_answer import Verification, VerifyRequest
from moetune.applications.verifying import verify as _verify
from moetune.domain.errors import MoetuneError

if TYPE_CHECKING:
    from collections.abc import Callable

    from moetune.applications.path_arguments import AnyPath

__all__ = [
    "Borrow",
    "BorrowRequest",
    "Diagnosis",
    "DoctorRequest",
    "InstallRequest",
    "Installed",
    "LintRequest",
    "Linted",
    "Machine",
    "MeasureRequest",
    "MeasuredTuning",
    "MoetuneError",
    "Outlook",
    "Plan",
    "Prepared",
    "Progress",
    "Replay",
    "Report",
    "Request",
    "RoutingAnswer",
    "RoutingRequest",
    "Status",
    "TakenBack",
    "TuneRequest",
    "Tuned",
    "UninstallRequest",
    "Uninstalled",
    "Verification",
    "VerifyRequest",
    "borrow",
    "doctor",
    "experiment",
    "install",
    "lint",
    "machine",
    "plan",
    "preview_experiment",
    "preview_install",
    "preview_uninstall",
    "replay",
    "routing",
    "status",
    "take_experiment_back",
    "tune",
    "tune_measured",
    "uninstall",
    "verify",
]

P = ParamSpec("P")
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


def _verb(
    name: str,
    text: str,
    request: Callable[P, Asked],
    answer: Callable[[Asked], Answer],
    answers: type[Answer],
) -> Callable[P, Answer]:
    """A function that takes what a request takes: its fields are the one list of parameters."""

    def verb(*args: P.args, **kwargs: P.kwargs) -> Answer:
        return answer(request(*args, **kwargs))

    verb.__name__ = verb.__qualname__ = name
    described = [kind for kind in inspect.getmro(cast("type", request)) if kind is not object]
    verb.__doc__ = "\n\n".join([text, *(inspect.getdoc(kind) or "" for kind in described)])
    signature = inspect.signature(request)
    verb.__signature__ = signature.replace(return_annotation=answers)  # type: ignore[attr-defined]
    return verb


plan = _verb(
    "plan",
    "Say what the server will run, what it looks for, and what tuned files would gain.",
    Request,
    make_plan,
    Plan,
)
tune = _verb(
    "tune",
    "Find configs by prediction and write the server's files.",
    TuneRequest,
    tune_request,
    Tuned,
)
tune_measured = _verb(
    "tune_measured",
    "Find configs by measuring on the GPUs of this machine and write the server's files.",
    MeasureRequest,
    _tune_measured,
    MeasuredTuning,
)
lint = _verb(
    "lint",
    "Say what is wrong with config files: what cannot run, what computes wrong numbers, what is never read.",
    LintRequest,
    _lint,
    Linted,
)
borrow = _verb(
    "borrow",
    "Make config files of another GPU, server or Triton version safe for a target, and write them.",
    BorrowRequest,
    _borrow,
    Borrow,
)
verify = _verb(
    "verify",
    "Verify that the server finds and reads config files; on a GPU also their numbers and times.",
    VerifyRequest,
    _verify,
    Verification,
)
preview_install = _verb(
    "preview_install",
    "Look at what an install would do; nothing is changed.",
    InstallRequest,
    prepare_install,
    Prepared,
)
install = _verb(
    "install",
    "Put config files where the server will look, all or none; what is replaced is kept.",
    InstallRequest,
    lambda request: _install(prepare_install(request)),
    Installed,
)
preview_uninstall = _verb(
    "preview_uninstall",
    "Look at what an uninstall would do; nothing is changed.",
    UninstallRequest,
    lambda request: _uninstall(request, dry_run=True),
    Uninstalled,
)
uninstall = _verb(
    "uninstall",
    "Bring back what was there before installs, where what is there is what moetune wrote.",
    UninstallRequest,
    _uninstall,
    Uninstalled,
)
doctor = _verb(
    "doctor",
    "Read logs of SGLang or vLLM and say what is wrong, worst first, with the commands that mend it.",
    DoctorRequest,
    diagnose_request,
    Diagnosis,
)
routing = _verb(
    "routing",
    "Inspect recorded expert choices, or make synthetic ones.",
    RoutingRequest,
    _routing,
    RoutingAnswer,
)


def status(*, state: AnyPath | None = None) -> Status:
    """Say what is installed where, whether it still stands, and whether the server still finds it.

    Args:
        state: the state directory; None: MOETUNE_STATE, else the XDG state directory.

    Raises:
        MoetuneError: when the records cannot be read.
    """
    return _status(_path(state))


def machine() -> Machine:
    """Say what this machine is: its servers, GPUs and versions, fit to paste into a bug report."""
    return inspect_machine()


def replay(landscape: AnyPath, *, measurements: int = 0, seed: int = 0, strategy: str = "guided") -> Replay:
    """Replay a search strategy on a recorded landscape.

    Args:
        landscape: `NAME.csv.gz`, with `NAME.json` beside it.
        measurements: for each kernel and m; 0 takes the model's first pick.
        seed: of strategies that draw.
        strategy: which one.

    Raises:
        MoetuneError: for a broken landscape, an unknown strategy, or a senseless budget.
    """
    return _replay(Path(landscape), measurements, seed, strategy=strategy)


def preview_experiment(plan: AnyPath, *, state: AnyPath | None = None) -> Outlook:
    """Say what a plan would do; nothing is started or changed.

    Args:
        plan: the plan's file.
        state: the state directory; None: MOETUNE_STATE, else the XDG state directory.

    Raises:
        MoetuneError: when it could not run.
    """
    return look_ahead(Path(plan), _path(state), os.environ)


def experiment(
    plan: AnyPath, *, state: AnyPath | None = None, show: Callable[[Progress], None] | None = None
) -> Report:
    """Run a plan on a real server, or go on with it. A plan is code: its commands are started.

    Args:
        plan: the plan's file.
        state: the state directory; None: MOETUNE_STATE, else the XDG state directory.
        show: told where the experiment is.

    Raises:
        KeyboardInterrupt: when it was interrupted: nothing runs, and the config files are as before.
        MoetuneError: when it cannot run.
    """
    return run_experiment(Path(plan), _path(state), os.environ, show or (lambda _: None))


def take_experiment_back(
    name: str, *, state: AnyPath | None = None, dry_run: bool = False, forget: bool = False
) -> TakenBack:
    """Bring back the state before an experiment.

    Args:
        name: of the experiment.
        state: the state directory; None: MOETUNE_STATE, else the XDG state directory.
        dry_run: change nothing.
        forget: leave what somebody else has changed as it is, for good.

    Raises:
        MoetuneError: when it cannot be done, or the experiment runs.
    """
    where = state_path(_path(state), os.environ)
    return _take_back(where, name, os.environ, dry_run=dry_run, forget=forget)


def _path(given: AnyPath | None) -> Path | None:
    return None if given is None else Path(given)
