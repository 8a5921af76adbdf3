"""A plan against what is known of its server, GPU and model, before the first start.

An intervention with an error is one that cannot be active: its verdict is known without a start. The
others go on. Nothing is guessed: what depends on a fact that is not known is left to the server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moetune.applications.experiments.command_line import arm_command
from moetune.applications.experiments.config_checks import ArmView, config_problems
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.gpu import find_gpu
from moetune.domain.text import printable
from moetune.servers.command_facts import CommandFacts, command_words, read_command
from moetune.servers.command_options import last_values
from moetune.servers.flag_data import Severity
from moetune.servers.flags import (
    FlagProblem,
    Setting,
    book_of,
    flag_problems,
    known_flag,
    proofs_of,
    settings_of,
    spelling_problems,
)
from moetune.servers.protocol import Applies, RunnerVerdict
from moetune.servers.registry import open_server
from moetune.servers.runner_facts import compute_capability, scheme

if TYPE_CHECKING:
    from moetune.domain.experiment_plan import Intervention, Plan, ServerPlan
    from moetune.domain.gpu import Gpu
    from moetune.domain.model import ExpertLayer
    from moetune.servers.protocol import Server
    from moetune.servers.runner_rules import Fact

BASELINE_LINE = 0
_WEIGHT_ONLY = ("int4_w4a16", "int8_w8a16")
_REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class PlanProblem:
    """Something that is known about a plan before it runs.

    Attributes:
        severity: `error`: the intervention cannot be active, and is not started; `warning`: worth knowing.
        intervention: name of it; empty: the baseline.
        line: of the plan.
        message: what is wrong, with what.
        hint: what to do instead.
    """

    severity: Severity
    intervention: str
    line: int
    message: str
    hint: str

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        who = f"{self.intervention}: " if self.intervention else ""
        return f"{where}{who}{self.message}" + (f"; {self.hint}" if self.hint else "")


def command_facts(server: ServerPlan, interventions: Sequence[Intervention] = ()) -> CommandFacts:
    """What the command of an arm says; what the plan says itself wins.

    Raises:
        InputError: for interventions that do not fit the command.
    """
    command = arm_command(server, [replace(one, configs=(), without_configs=False) for one in interventions])
    facts = read_command(server.name, command.arguments, command.environment, server.version)
    split = replace(facts.parallelism, tp=server.tp) if server.tp else facts.parallelism
    return replace(facts, model=server.model or facts.model, parallelism=split)


def check_plan(
    plan: Plan, *, version: str = "", gpu: Gpu | None = None, layer: ExpertLayer | None = None
) -> tuple[PlanProblem, ...]:
    """Check a plan's baseline and each of its interventions alone.

    Args:
        plan: what `read_plan` returned.
        version: release of the server as it is known, over the plan's; empty: nobody knows it, and then
            nothing is an error that depends on it.
        gpu: what the server runs on; None: as the plan names it, else unknown.
        layer: the model's expert layer, None when it is not known.

    Returns:
        In the order of the plan, the baseline's first.
    """
    found = list(_baseline_problems(plan))
    for one in plan.interventions:
        found += problems_of_arm(plan, (one,), version=version, gpu=gpu, layer=layer)
    return tuple(dict.fromkeys(found))


def problems_of_arm(
    plan: Plan,
    interventions: Sequence[Intervention],
    *,
    version: str = "",
    gpu: Gpu | None = None,
    layer: ExpertLayer | None = None,
) -> tuple[PlanProblem, ...]:
    """Check interventions that are on together; the arguments are those of `check_plan`."""
    name = ", ".join(one.name for one in interventions)
    line = interventions[0].line if interventions else BASELINE_LINE
    try:
        facts = command_facts(plan.server, interventions)
    except InputError as error:
        return (PlanProblem("error", name, line, error.message, error.hint or ""),)
    checking = _Checking(plan, version or plan.server.version, gpu or _named_gpu(plan.server), layer)
    return tuple(
        PlanProblem(severity, name, line, message, hint)
        for severity, message, hint in checking.arm(facts, interventions)
    )


Found = tuple[Severity, str, str]


class _Checking:
    def __init__(self, plan: Plan, version: str, gpu: Gpu | None, layer: ExpertLayer | None) -> None:
        self._plan, self._version, self._gpu, self._layer = plan, version, gpu, layer
        self._server = _open(plan.server, version)

    def arm(self, facts: CommandFacts, interventions: Sequence[Intervention]) -> Iterator[Found]:
        """What is known about an arm."""
        name = self._plan.server.name
        book = book_of(name)
        verdict = self._runner(facts)
        if book is not None:
            known: dict[str, Fact] = {**command_words(book, facts), **self._facts(facts, verdict)}
            for one in interventions:
                settings = _own_settings(name, self._version, one)
                problems = (
                    *flag_problems(name, self._version, settings, known),
                    *spelling_problems(name, self._version, one.arguments),
                )
                for problem in problems:
                    yield self._of_flag(problem)
                yield from self._unproven(one)
            yield from self._choice(facts, interventions, verdict)
        view = ArmView(self._server, self._gpu, self._layer, facts, verdict)
        for one in interventions:
            yield from config_problems(one, view, far=bool(self._plan.server.host))

    def _of_flag(self, problem: FlagProblem) -> Found:
        severity, message = problem.severity, f"{problem.flag}: {problem.message}"
        if not self._version and severity == "error":
            return (
                "warning",
                f"{message} (by the newest rules: the plan does not say the version)",
                problem.hint,
            )
        return severity, message, problem.hint

    def _runner(self, facts: CommandFacts) -> RunnerVerdict | None:
        if self._server is None or self._gpu is None or self._layer is None:
            return None
        return self._server.runner(self._layer, facts.parallelism, self._gpu, facts.options)

    def _facts(self, facts: CommandFacts, verdict: RunnerVerdict | None) -> dict[str, Fact]:
        """What the conditions of the table ask about; None where it is not known."""
        gpu, layer = self._gpu, self._layer
        split = facts.parallelism
        dtype = layer.quantization.dtype.value if layer is not None else None
        return {
            "gpu": gpu.torch_name if gpu is not None else None,
            "cc": compute_capability(gpu) if gpu is not None else None,
            "vendor": gpu.vendor.lower() if gpu is not None else None,
            "h20": _is_h20(gpu.torch_name) if gpu is not None else None,
            "arch": layer.architecture if layer is not None else None,
            "scheme": scheme(layer.quantization, facts.options.quantization) if layer is not None else None,
            "bits_only": dtype in _WEIGHT_ONLY if dtype is not None else None,
            "topk": self._topk(facts),
            "tp": split.tp,
            "ep": split.ep,
            "dp": split.dp,
            "pp": facts.pipeline,
            "nnodes": facts.nodes,
            "a2a": facts.options.moe_a2a_backend,
            "reads": verdict.applies.value if verdict is not None else None,
            "runner": verdict.runner if verdict is not None else None,
            "force": verdict.force_triton if verdict is not None else None,
        }

    def _topk(self, facts: CommandFacts) -> int | None:
        """Experts a token goes to in the kernel, fused shared ones included."""
        if self._server is None or self._layer is None or self._gpu is None:
            return None
        try:
            return self._server.problem(self._layer, facts.parallelism, self._gpu, facts.options).topk
        except MoetuneError:
            return self._layer.topk

    def _choice(
        self, facts: CommandFacts, interventions: Sequence[Intervention], verdict: RunnerVerdict | None
    ) -> Iterator[Found]:
        """Whether the MoE runner that is asked for exists, and is another one than the baseline's."""
        if verdict is None:
            return
        base = self._runner(command_facts(self._plan.server))
        chosen = facts.options.moe_runner_backend
        before = command_facts(self._plan.server).options.moe_runner_backend
        if base is None or chosen == before:
            return
        reason = verdict.reason.rstrip(".")
        if verdict.runner == _REFUSED:
            severity: Severity = "error" if self._version else "warning"
            yield severity, f"the MoE runner {printable(chosen, 60)}: {reason}", "choose another one"
        elif verdict.runner.lower() == base.runner.lower() and verdict.applies is not Applies.UNKNOWN:
            names = ", ".join(one.name for one in interventions)
            yield (
                "warning",
                f"the MoE runner is {verdict.runner} in the baseline too, so that {printable(names, 80)} "
                f"changes nothing of it ({reason})",
                "leave it out",
            )

    def _unproven(self, one: Intervention) -> Iterator[Found]:
        """Variables that no line shows: without proof there is no verdict."""
        if one.proof or one.configs or one.without_configs or one.arguments or one.remove:
            return
        if not proofs_of(self._plan.server.name, self._version, one):
            names = ", ".join(printable(name, 80) for name in one.environment)
            yield (
                "warning",
                f"no line of the log is known that shows {names}: without a proof its numbers are not judged",
                "give a text of the log that shows it as proof, or a fact that it changes as may_change",
            )


def _baseline_problems(plan: Plan) -> Iterator[PlanProblem]:
    """The port, which each start has to have for itself."""
    server = plan.server
    said = [value for flag, value in last_values(server.command).items() if flag in ("--port", "-p")]
    chosen = any("{port}" in word for word in (*server.command, *server.environment.values()))
    literal = said[0][0] if said and said[0] else ""
    if not chosen and literal.isascii() and literal.isdigit() and literal != str(server.port):
        yield PlanProblem(
            "error",
            "",
            BASELINE_LINE,
            f"the command says port {printable(literal, 20)}, and the plan {server.port}: the server would "
            "be asked where it does not listen",
            'write "--port", "{port}" in the command',
        )
    elif not chosen:
        yield PlanProblem(
            "warning",
            "",
            BASELINE_LINE,
            f"the command has no {{port}}: the server has to listen on {server.port} by itself, and that "
            "port has to be free at each start",
            'write "--port", "{port}" in the command',
        )


def _open(server: ServerPlan, version: str) -> Server | None:
    if book_of(server.name) is None:
        return None
    try:
        return open_server(server.name, version or None, server.triton_version or None)
    except MoetuneError:
        return None


def _named_gpu(server: ServerPlan) -> Gpu | None:
    if not server.gpu:
        return None
    try:
        return find_gpu(server.gpu)
    except MoetuneError:
        return None


def _own_settings(server: str, version: str, one: Intervention) -> tuple[Setting, ...]:
    """What an intervention gives: flags, then the variables that the table knows."""
    variables = (
        Setting(name, value)
        for name, value in one.environment.items()
        if value and (known_flag(server, "", name) or known_flag(server, version, name))
    )
    return (*settings_of(server, one.arguments, version), *variables)


def _is_h20(name: str) -> bool:
    return "H20" in name and "H200" not in name
