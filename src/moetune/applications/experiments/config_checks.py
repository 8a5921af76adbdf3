"""Config files of an intervention, before they are put in place: whether they could change anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.applications.config_files import discover
from moetune.applications.lint import lint
from moetune.applications.lint_report import LintRequest
from moetune.domain.errors import MoetuneError
from moetune.domain.file_names import parse_file_name
from moetune.domain.findings import Severity as Worst
from moetune.domain.text import printable
from moetune.servers.flag_data import Severity
from moetune.servers.protocol import Applies

if TYPE_CHECKING:
    from moetune.domain.experiment_plan import Intervention
    from moetune.domain.gpu import Gpu
    from moetune.domain.model import ExpertLayer
    from moetune.domain.problem import Problem
    from moetune.servers.command_facts import CommandFacts
    from moetune.servers.protocol import RunnerVerdict, Server

Found = tuple[Severity, str, str]
_MODES = {"sglang": "deterministic inference", "vllm": "batch invariance"}
_FATAL = frozenset({Worst.CRASH, Worst.CANNOT_RUN, Worst.WRONG_NUMBERS})
# About the tree that a file was found in, not about the place where it is put.
_OF_TREES = frozenset({"MOE104", "MOE105"})
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class ArmView:
    """What is known of an arm; None where it is not.

    Attributes:
        server: its release.
        gpu: that it runs on.
        layer: the model's expert layer.
        facts: what its command says.
        verdict: which MoE runner it chooses.
    """

    server: Server | None
    gpu: Gpu | None
    layer: ExpertLayer | None
    facts: CommandFacts
    verdict: RunnerVerdict | None

    @property
    def problem(self) -> Problem | None:
        """What the server looks files up for; None where that is not known."""
        if self.server is None or self.gpu is None or self.layer is None:
            return None
        try:
            return self.server.problem(self.layer, self.facts.parallelism, self.gpu, self.facts.options)
        except MoetuneError:
            return None


def config_problems(one: Intervention, view: ArmView, *, far: bool) -> Iterator[Found]:
    """What speaks against an intervention that puts config files in place or takes them away.

    Args:
        one: the intervention.
        view: the arm with it.
        far: the server runs on another machine.
    """
    if not one.configs and not one.without_configs:
        return
    mode = tuple(_mode(view))
    yield from mode or _runner(view)
    if one.configs:
        yield from _files(one, view, far=far)


def _mode(view: ArmView) -> Iterator[Found]:
    if view.server is not None and view.facts.options.deterministic:
        mode = _MODES.get(view.server.name, "deterministic mode")
        yield (
            "error",
            f"{mode} is on, in which {view.server.name} opens no config file: this arm is void",
            f"try it without {mode}",
        )


def _runner(view: ArmView) -> Iterator[Found]:
    verdict = view.verdict
    if verdict is None or verdict.applies is Applies.YES:
        return
    reason = verdict.reason.rstrip(".")
    if verdict.applies is Applies.UNKNOWN:
        yield (
            "warning",
            f"which MoE runner this server chooses is not known, so that its config files may not matter: "
            f"{reason}",
            "look for a line `Using ... config` in the baseline's log",
        )
    elif verdict.applies is Applies.PARTLY:
        yield (
            "warning",
            f"{verdict.runner} reads config files in a part of the cases only: {verdict.reason}",
            "",
        )
    else:
        hint = f"try it together with {verdict.force_triton}" if verdict.force_triton else "leave it out"
        yield (
            "error",
            f"the MoE runner is {verdict.runner}, which reads no tuned Triton config: {reason}",
            hint,
        )


def _files(one: Intervention, view: ArmView, *, far: bool) -> Iterator[Found]:
    try:
        files = discover([Path(path) for path in one.configs]).files
    except MoetuneError as error:
        if not far:
            yield "error", error.message, error.hint or ""
        return
    if not files:
        yield (
            "error",
            f"no config file lies in {printable(', '.join(one.configs), 400)}",
            "`moetune tune MODEL --out DIR` writes them",
        )
        return
    if view.server is None:
        return
    read, found = _looked_for(files, view, view.server)
    yield from found
    if read:
        yield from _judged(read, view, view.server)


def _looked_for(
    files: Sequence[Path], view: ArmView, server: Server
) -> tuple[tuple[Path, ...], tuple[Found, ...]]:
    """The files that this server would look for on this GPU, and what to say of the others."""
    problem = view.problem
    if problem is not None:
        wanted = server.file_name(problem, "up")
        names = {wanted, server.file_name(problem, "down")}
        read = tuple(path for path in files if path.name in names)
        if any(path.name == wanted for path in read):
            return read, ()
        near = ", ".join(printable(path.name, 160) for path in files[:_SHOWN])
        message = f"none of the files is the one that {server.name} looks for ({wanted}): {near}"
        hint = f"make them for this server and GPU: moetune borrow, with --gpu {problem.gpu.torch_name!r}"
        return read, (("error", message, hint),)
    if view.gpu is None:
        return tuple(files), ()
    device = server.device_name(view.gpu)
    named = [(path, parse_file_name(path.name)) for path in files]
    read = tuple(path for path, name in named if name is not None and name.device == device)
    if read:
        return read, ()
    others = sorted({name.device for _, name in named if name is not None})
    message = (
        f"the files are for {', '.join(printable(one, 60) for one in others[:_SHOWN])}, and this GPU is "
        f"{device} in file names: they would never be read"
    )
    return (), (("error", message, f"make them for it: moetune borrow, with --gpu {view.gpu.torch_name!r}"),)


def _judged(files: Sequence[Path], view: ArmView, server: Server) -> Iterator[Found]:
    """What `moetune lint` says of the files that would be read."""
    request = LintRequest(
        paths=tuple(files),
        server=server.name,
        server_version=server.version,
        triton_version=server.triton_version,
        gpu=view.gpu.torch_name if view.gpu is not None else None,
        compute_capability=view.gpu.target or None if view.gpu is not None else None,
        max_m=view.facts.prefill_chunk or LintRequest().max_m,
    )
    try:
        linted = lint(request, {})
    except MoetuneError as error:
        yield "warning", f"the files could not be looked at: {error.message}", error.hint or ""
        return
    for finding in linted.findings:
        if finding.code.severity in _FATAL and finding.code.code not in _OF_TREES:
            where = printable(Path(finding.where).name, 160)
            yield (
                "error",
                f"{finding.code.code} {where}: {finding.message}",
                finding.mend or "moetune borrow it",
            )
