"""A plan with the arms worth trying for a model, a GPU and a server's release, simplest first."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.applications.catalogue import tuned_files
from moetune.applications.checkpoints import resolve
from moetune.applications.environment import config_trees, find_installed
from moetune.applications.experiments.candidates import CANDIDATES, ONLY_ON, Candidate
from moetune.applications.experiments.plan_checks import command_facts, problems_of_arm
from moetune.applications.experiments.plan_text import render_plan
from moetune.applications.request import DEFAULT_OUT
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.experiment_plan import Budget, Intervention, LoadPlan, Plan, ServerPlan
from moetune.domain.gpu import find_gpu
from moetune.domain.text import printable
from moetune.servers.flags import settings_of
from moetune.servers.protocol import Applies, Outcome
from moetune.servers.registry import open_server

if TYPE_CHECKING:
    from moetune.applications.environment import Installed
    from moetune.domain.gpu import Gpu
    from moetune.domain.model import ExpertLayer
    from moetune.domain.problem import Problem
    from moetune.servers.protocol import RunnerVerdict, Server

BORROWED = "borrowed-configs"
"""Directory of the arm with borrowed files."""

_MINUTES = 480.0
_GENERATORS = {"sglang": "sglang.bench_serving", "vllm": "vllm bench serve"}
_DEFAULT_ON, _NOT_THERE = "on by default", "does not have it"
_SHOWN = ("load.requests", "load.concurrency", "load.input_tokens", "load.output_tokens")
_RUNNER_FLAGS = {"sglang": "--moe-runner-backend", "vllm": "--moe-backend"}


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A plan to start from.

    Attributes:
        plan: as `read_plan` would return it but for its paths, which stay relative.
        text: the plan's file.
        left_out: arms that were thought of, and why they are not in it.
    """

    plan: Plan
    text: str
    left_out: tuple[tuple[str, str], ...]


def suggest(
    model: str,
    *,
    gpu: str,
    server: str,
    version: str = "",
    tp: int = 1,
    command: Sequence[str] = (),
    offline: bool = False,
    out: str = DEFAULT_OUT,
    environ: Mapping[str, str] | None = None,
) -> Suggestion:
    """Write a plan with the arms worth trying.

    Args:
        model: id, path or packaged checkpoint.
        gpu: name of the GPUs that the server runs on.
        server: `sglang` or `vllm`.
        version: its release; empty: the installed one, else the newest known.
        tp: tensor-parallel size, for a command that does not say it.
        command: that starts the known-good server; empty: the plainest one.
        offline: never ask the network.
        out: directory that `moetune tune --out` writes to.
        environ: variables of the server, for the files that it finds; None takes those of this process.

    Raises:
        MoetuneError: for a model, GPU or server that is not known.
    """
    if server not in CANDIDATES:
        raise InputError(
            f"arms are known for {' and '.join(CANDIDATES)}, not for {printable(server, 40)!r}",
            "write the plan by hand: docs/experiment-plan.md",
        )
    environ = os.environ if environ is None else environ
    layer = resolve(model, offline=offline)
    board = find_gpu(gpu)
    package = find_installed(server)
    release = open_server(server, version or (package.version if package is not None else None))
    base = _base(model, board, release, tp, tuple(command))
    return _Suggesting(base, layer, board, release, out, environ).run()


def _base(model: str, gpu: Gpu, server: Server, tp: int, command: tuple[str, ...]) -> Plan:
    name = server.name
    return Plan(
        name=printable(f"{model.rstrip('/').rpartition('/')[2]} on {gpu.torch_name}", 120),
        server=ServerPlan(
            name=name,
            command=command or _plainest(name, model, tp),
            version=server.version,
            gpu=gpu.torch_name,
            model=model if command else "",
            tp=tp if command and tp > 1 else 0,
        ),
        load=LoadPlan(
            generator=_GENERATORS[name], requests=200, concurrency=16, input_tokens=1024, output_tokens=256
        ),
        interventions=(),
        budget=Budget(minutes=_MINUTES),
    )


def _plainest(server: str, model: str, tp: int) -> tuple[str, ...]:
    address = ("--host", "127.0.0.1", "--port", "{port}")
    if server == "vllm":
        return ("vllm", "serve", model, *address, "--tensor-parallel-size", str(tp))
    return ("python", "-m", "sglang.launch_server", "--model-path", model, *address, "--tp-size", str(tp))


class _Suggesting:
    def __init__(
        self,
        base: Plan,
        layer: ExpertLayer,
        gpu: Gpu,
        server: Server,
        out: str,
        environ: Mapping[str, str],
    ) -> None:
        self._base, self._layer, self._gpu, self._server = base, layer, gpu, server
        self._out, self._environ = out, environ
        self._facts = command_facts(base.server)
        self._notes: dict[str, list[str]] = {}
        self._left_out: list[tuple[str, str]] = []

    def run(self) -> Suggestion:
        chosen = [*self._config_arms(), *self._flag_arms()]
        if not chosen:
            why = "; ".join(f"{name}: {reason}" for name, reason in self._left_out)
            raise InputError(
                f"no arm is worth trying here: {why}", "write the plan by hand: docs/experiment-plan.md"
            )
        plan = replace(self._base, interventions=tuple(chosen))
        text = render_plan(plan, {**self._heads(), **self._notes}, _SHOWN)
        return Suggestion(plan, text, tuple(self._left_out))

    # config files

    def _config_arms(self) -> Iterator[Intervention]:
        problem, verdict = self._problem(), self._verdict()
        if problem is None:
            self._leave_out("tuned configs", "the server has no Triton kernel for this checkpoint")
            return
        if verdict.applies not in (Applies.YES, Applies.PARTLY):
            reason = verdict.reason.rstrip(".")
            self._leave_out("tuned configs", f"the MoE runner is {verdict.runner or 'not known'}: {reason}")
            arms = [self._forced()]
        else:
            arms = list(self._file_arms(problem))
        for one, why in arms:
            if self._accepted(one):
                self._notes[f"intervention:{one.name}"] = why
                yield one

    def _forced(self) -> tuple[Intervention, list[str]]:
        """Tuned files together with the runner that reads them."""
        flag = _RUNNER_FLAGS[self._server.name]
        one = Intervention("tuned configs, Triton runner", arguments=(flag, "triton"), configs=(self._out,))
        why = "Another MoE runner is the default here: the Triton one with tuned files against it."
        return one, [*_wrapped(why), f"Write them first: {self._tune('triton')}"]

    def _file_arms(self, problem: Problem) -> Iterator[tuple[Intervention, list[str]]]:
        trees = config_trees(self._server, self._environ, self._installed())
        shipped = self._server.lookup(problem, "up", trees, self._facts.options)
        tuned = Intervention("tuned configs", configs=(self._out,))
        yield tuned, [f"Write them first: {self._tune()}"]
        if shipped.outcome in (Outcome.EXACT, Outcome.STALE):
            why = f"A file is there already, {printable(shipped.found or '', 300)}: what is it worth?"
            yield Intervention("no config files", without_configs=True), _wrapped(why)
        # Files of another shape cannot be borrowed, only those of another GPU, server or Triton.
        own = (file for file in tuned_files(self._server, problem, trees) if file.name.E == problem.E)
        near = next((file for file in own if problem.file_n == file.name.N), None)
        if near is not None and shipped.outcome is not Outcome.EXACT:
            why = (
                f"A file of {near.gpu.torch_name} is published ({printable(near.reason, 200)}); make it safe:"
            )
            yield (
                Intervention("borrowed configs", configs=(BORROWED,)),
                [*_wrapped(why), self._borrow(near.path)],
            )

    def _verdict(self) -> RunnerVerdict:
        facts = self._facts
        return self._server.runner(self._layer, facts.parallelism, self._gpu, facts.options)

    def _problem(self) -> Problem | None:
        try:
            return self._server.problem(self._layer, self._facts.parallelism, self._gpu, self._facts.options)
        except MoetuneError:
            return None

    def _installed(self) -> Installed | None:
        package = find_installed(self._server.name)
        return package if package is not None and package.version == self._server.version else None

    def _tune(self, runner: str = "") -> str:
        split = self._facts.parallelism
        words = ["moetune", "tune", self._facts.model or self._layer.model]
        words += ["--server", self._server.name, "--server-version", self._server.version]
        words += ["--tp", str(split.tp), *(["--ep", str(split.ep)] if split.ep > 1 else [])]
        words += ["--runner-backend", runner] if runner else []
        return shlex.join([*words, "--gpu", self._gpu.torch_name, "--out", self._out])

    def _borrow(self, path: str) -> str:
        words = ["moetune", "borrow", path, "--server", self._server.name]
        words += ["--server-version", self._server.version, "--gpu", self._gpu.torch_name]
        return shlex.join([*words, "--out", BORROWED])

    # flags

    def _flag_arms(self) -> Iterator[Intervention]:
        default_on: set[str] = set()
        taken: set[str] = set()
        base_flags = {setting.name for setting in self._facts.settings}
        for candidate in CANDIDATES[self._server.name]:
            one = Intervention(candidate.name, arguments=candidate.arguments)
            flags = {setting.name for setting in settings_of(self._server.name, candidate.arguments)}
            if candidate.name in taken or flags & base_flags:
                continue
            if candidate.unless_default and candidate.unless_default not in default_on:
                continue
            if not self._other_runner(candidate) or not self._accepted(one, default_on):
                continue
            taken.add(candidate.name)
            self._notes[f"intervention:{one.name}"] = _wrapped(candidate.why)
            yield one

    def _other_runner(self, candidate: Candidate) -> bool:
        """Whether a candidate that names a MoE runner names another one than the default, and a good one."""
        if candidate.arguments[0] not in ("--moe-runner-backend", "--moe-backend"):
            return True
        wanted = candidate.arguments[1]
        majors = ONLY_ON.get(wanted)
        capability = self._gpu.compute_capability
        if majors is not None and (capability is None or capability[0] not in majors):
            return False
        options = replace(self._facts.options, moe_runner_backend=wanted)
        verdict = self._server.runner(self._layer, self._facts.parallelism, self._gpu, options)
        if wanted == "triton" and verdict.applies not in (Applies.YES, Applies.PARTLY):
            self._leave_out(candidate.name, verdict.reason.rstrip("."))
            return False
        return verdict.runner.lower() != self._verdict().runner.lower()

    def _accepted(self, one: Intervention, default_on: set[str] | None = None) -> bool:
        """Whether nothing that is known speaks against an arm; why it does not is noted."""
        checked = one
        if one.configs and not all(Path(path).exists() for path in one.configs):
            # What is written later is not judged yet.
            checked = replace(one, configs=(), without_configs=True)
        problems = problems_of_arm(
            self._base, (checked,), version=self._server.version, gpu=self._gpu, layer=self._layer
        )
        errors = [problem for problem in problems if problem.severity == "error"]
        if errors:
            self._leave_out(one.name, errors[0].message)
            if default_on is not None and any(_DEFAULT_ON in problem.message for problem in errors):
                default_on.add(one.name)
        return not errors

    def _leave_out(self, name: str, reason: str) -> None:
        """Note why an arm is not there, once; a flag that this release never had is no news."""
        if _NOT_THERE not in reason and name not in dict(self._left_out):
            self._left_out.append((name, reason))

    def _heads(self) -> dict[str, list[str]]:
        server, split = self._server, self._facts.parallelism
        heads = {
            "": [
                f"Arms worth trying for {printable(self._layer.model, 120)} (tp {split.tp}) on",
                f"{self._gpu.torch_name} with {server.name} {server.version}, simplest first.",
                "What it would do and how long it takes, starting nothing: moetune experiment FILE --dry-run",
            ],
            "server": ["The known-good server, which every arm is compared with."],
            "server.command": [
                "Put your own command here, with {port} where the port stands; no shell reads it."
            ],
            "load": ["One load for all arms: give it the lengths and the concurrency of your traffic."],
            "budget": ["No start is begun that could not end by then."],
        }
        if self._left_out:
            heads[""] += [
                "",
                "Left out:",
                *(line for item in self._left_out for line in _wrapped(": ".join(item))),
            ]
        return heads


def _wrapped(text: str, width: int = 100) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
