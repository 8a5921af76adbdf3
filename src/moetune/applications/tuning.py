"""From a request to the server's files: predicted, compiled where Triton is, written, and found again."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetune.applications.environment import config_trees, find_installed
from moetune.applications.output import TableFile, Written, write_tables
from moetune.applications.planning import GpuPlan, Plan, make_plan
from moetune.applications.predicting import NOISE, NothingFitsError, Predicted, forecast, keys_for
from moetune.applications.provenance import Check, Conditions, Kind, Provenance
from moetune.applications.request import Request, TuneRequest
from moetune.applications.start_from import configs_of
from moetune.domain.codec import to_json
from moetune.domain.compilation import CompileStatus
from moetune.domain.problem import KERNELS, Kernel
from moetune.domain.space import search_axes
from moetune.servers.other_kernel import with_own_entries
from moetune.servers.protocol import Outcome
from moetune.servers.registry import open_server

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from moetune.applications.compiling import CompilePool
    from moetune.applications.predicting import Forecast, Rejected
    from moetune.domain.choose import Pair
    from moetune.domain.compilation import CompileResult
    from moetune.domain.config import ConfigTable, KernelConfig
    from moetune.domain.keys import Keys
    from moetune.domain.launch import Launch
    from moetune.domain.problem import Problem
    from moetune.servers.protocol import Server

SCHEMA = "moetune.tune/1"
MAX_ROUNDS = 8
"""How often what does not compile is replaced before the problem is given up."""

_BAD = frozenset(
    {CompileStatus.REFUSED, CompileStatus.COMPILER_FAILURE, CompileStatus.CRASHED, CompileStatus.TIMED_OUT}
)


@dataclass(frozen=True, slots=True)
class CompileReport:
    """What compiling the chosen configs of one problem showed.

    Attributes:
        gpu: name of the GPU that they were compiled for.
        triton: the Triton that compiled them; empty where nothing was compiled.
        compiled: configs that compiled and fit.
        unchecked: configs that were not compiled.
        why_unchecked: the reason.
        replaced: what did not compile, and why; others stand in their place.
    """

    gpu: str
    triton: str
    compiled: int
    unchecked: int
    why_unchecked: str
    replaced: tuple[str, ...]

    @property
    def text(self) -> str:
        """In a sentence."""
        if not self.compiled:
            return f"not compiled: {self.why_unchecked}"
        rest = f"; {self.unchecked} not compiled: {self.why_unchecked}" if self.unchecked else ""
        replaced = f"; {len(self.replaced)} did not compile and were replaced" if self.replaced else ""
        return f"{self.compiled} configs compile with Triton {self.triton}{replaced}{rest}"


@dataclass(frozen=True, slots=True)
class Tuned:
    """The answer to `moetune tune`.

    Attributes:
        plan: what `moetune plan` says, for the configs that were written.
        out: the directory below which files were written.
        files: the config files as they now stand; none where nothing is gained.
        compiled: for each GPU that has files.
        found: the server's own lookup, pointed to `out`, finds every file.
        replaces_shipped: pointed to `out`, the server no longer reads the files that it ships.
        use_command: what makes the server read the files.
        measure_command: what to run on a machine with that GPU.
    """

    plan: Plan
    out: Path
    files: tuple[Written, ...]
    compiled: tuple[CompileReport, ...]
    found: bool
    replaces_shipped: bool
    use_command: str
    measure_command: str

    def to_json(self) -> dict[str, Any]:
        """The document of `moetune tune --json`."""
        files = [
            {
                "path": str(file.path),
                "provenance": str(file.provenance),
                "state": file.state.value,
                "shared_with": file.shared_with,
            }
            for file in self.files
        ]
        return {
            "schema": SCHEMA,
            **self.plan.content(),
            "out": str(self.out),
            "written": files,
            "compiled": to_json(self.compiled),
            "found_by_lookup": self.found,
            "replaces_shipped": self.replaces_shipped,
            "use_command": self.use_command,
            "measure_command": self.measure_command,
        }


def tune_request(
    request: TuneRequest, environ: Mapping[str, str] | None = None, pool: CompilePool | None = None
) -> Tuned:
    """Find configs and write the server's files: for all GPUs asked for, or, on an error, none.

    Args:
        request: what is asked.
        environ: the variables of the server; None takes those of this process.
        pool: how to compile.

    Raises:
        MoetuneError: for what cannot be done; nothing was then written.
    """
    environ = os.environ if environ is None else environ
    out = Path(request.out)
    reports: dict[str, CompileReport] = {}
    start_from = configs_of(map(Path, request.start_from)) if request.start_from else ()

    def predictor(_: Request, server: Server, problem: Problem) -> Predicted:
        keys = keys_for(server, problem, request.max_m, request.traffic)
        compiler = _Compiler(server, problem, request.compile_configs, pool)
        predicted = compiler.settle(forecast(server, problem, start_from=start_from), keys)
        reports[problem.gpu.torch_name] = compiler.report()
        return predicted

    plan = make_plan(request, environ, predictor)
    server = open_server(plan.server.name, plan.server.version, plan.server.triton_version)
    gaining = [part for part in plan.gpus if part.gains]
    tables = [file for part in gaining for file in _table_files(server, plan, part, reports)]
    written = write_tables(tables, out, force=request.force) if tables else ()
    found, replaces = look_again(server, request, gaining, out, environ)
    return Tuned(
        plan=plan,
        out=out,
        files=written,
        compiled=tuple(reports[part.gpu.torch_name] for part in gaining),
        found=found,
        replaces_shipped=replaces,
        use_command=command_to_use(server, gaining, written, out),
        measure_command=measure_command(request),
    )


class _Compiler:
    """Compiles what was chosen for one problem, until all of it compiles."""

    def __init__(self, server: Server, problem: Problem, enabled: bool, pool: CompilePool | None) -> None:
        self._server, self._problem, self._enabled, self._pool = server, problem, enabled, pool
        self._results: dict[Launch, CompileResult] = {}
        self._chosen: frozenset[Launch] = frozenset()
        self._failed: dict[tuple[Kernel, KernelConfig], str] = {}

    def settle(self, forecast: Forecast, keys: Keys) -> Predicted:
        """Choose, compile, and choose again without what does not compile.

        Raises:
            NothingFitsError: when that does not come to an end.
        """
        for _ in range(MAX_ROUNDS):
            predicted = forecast.tables(keys, keys.ms[-1], self._rejected())
            if not self._enabled or not self._compile(predicted):
                return predicted
        why = next(iter(self._failed.values()))
        raise NothingFitsError(f"{len(self._failed)} of the best configs do not compile: {why}")

    def _rejected(self) -> Rejected:
        """What failed, whatever its GROUP_SIZE_M: that changes nothing for the compiler."""
        groups = search_axes(self._problem.gpu).group_size_m
        alike = {
            (kernel, replace(config, group_size_m=group))
            for kernel, config in self._failed
            for group in groups
        }
        return frozenset(alike | self._failed.keys())

    def _compile(self, predicted: Predicted) -> bool:
        """Compile what is new, and say whether something has to be replaced."""
        from moetune.applications.compiling import compile_check

        pairs = dict.fromkeys(choice.pair for choice in predicted.choices.entries)
        launches = {self._launch(kernel, pair): (kernel, pair) for pair in pairs for kernel in KERNELS}
        self._chosen = frozenset(launches)
        new = [launch for launch in launches if launch not in self._results]
        self._results.update(compile_check(new, self._problem, self._pool))
        bad = {launch: why for launch in launches if (why := self._why_bad(launch))}
        for launch, why in bad.items():
            kernel, pair = launches[launch]
            self._failed[kernel, pair.up if kernel == "up" else pair.down] = why
        return bool(bad)

    def _launch(self, kernel: Kernel, pair: Pair) -> Launch:
        if kernel == "up":
            return self._server.launch(self._problem, kernel, pair.up)
        return self._server.launch(self._problem, kernel, pair.down, pair.up)

    def _why_bad(self, launch: Launch) -> str:
        result = self._results[launch]
        limit = self._problem.gpu.smem_optin_bytes
        if result.status in _BAD:
            return f"{result.status.value}: {result.message}"
        if limit is not None and (result.shared_bytes or 0) > limit:
            return f"{result.shared_bytes} bytes of shared memory, {limit} are there"
        return ""

    def report(self) -> CompileReport:
        """What compiling showed."""
        triton = find_installed("triton")
        results = [self._results[launch] for launch in self._chosen]
        unchecked = [result for result in results if result.status is CompileStatus.NOT_CHECKED]
        reasons = dict.fromkeys(result.message for result in unchecked)
        compiled = len(results) - len(unchecked)
        return CompileReport(
            gpu=self._problem.gpu.torch_name,
            triton=triton.version if triton is not None and compiled else "",
            compiled=compiled,
            unchecked=len(unchecked),
            why_unchecked="; ".join(reasons) if self._enabled else "--no-compile",
            replaced=tuple(f"{kernel} {config}: {why}" for (kernel, config), why in self._failed.items()),
        )


def _table_files(
    server: Server, plan: Plan, part: GpuPlan, reports: Mapping[str, CompileReport]
) -> list[TableFile]:
    problem, predicted = part.problem, part.predicted
    assert problem is not None
    assert predicted is not None
    choices = predicted.choices
    tables: dict[Kernel, ConfigTable] = {"up": choices.up}
    if choices.down is not None:
        tables["down"] = choices.down
    report = reports[part.gpu.torch_name]
    return [
        TableFile(
            path=server.file_path(problem, kernel),
            text=server.render_table(problem, with_own_entries(server, problem, table)),
            provenance=Provenance(
                kind=Kind.PREDICTED,
                kernels=KERNELS if choices.down is None else (kernel,),
                problem=problem,
                choices=choices,
                conditions=Conditions(noise=NOISE),
                model=plan.layer.model,
                checks=(
                    Check("fits in closed form", True, f"{problem.gpu.sm}, Triton {server.triton_version}"),
                    Check(f"compiles for {problem.gpu.sm}", report.compiled > 0 or None, report.text),
                ),
                familiarity=predicted.familiarity,
                added_keys=predicted.added_keys,
                shortfalls=tuple(shortfall.m for shortfall in predicted.shortfalls),
            ),
        )
        for kernel, table in tables.items()
    ]


def look_again(
    server: Server, request: Request, gaining: list[GpuPlan], out: Path, environ: Mapping[str, str]
) -> tuple[bool, bool]:
    """Whether the server's lookup finds each file below `out`, and whether it then forgets its own."""
    variable = server.directory_variable
    if variable is None or not gaining:
        return False, False
    trees = config_trees(server, {**environ, variable: str(out)}, find_installed(server.name))
    shipped = trees[1].root if len(trees) > 1 else None
    found, replaces = True, False
    for part in gaining:
        for file in part.files:
            assert part.problem is not None
            lookup = server.lookup(part.problem, file.kernel, trees, request.server_options)
            found &= lookup.outcome in (Outcome.EXACT, Outcome.IGNORED)
            replaces |= shipped is not None and not any(
                path.startswith(shipped) for path in lookup.candidates
            )
    return found, replaces


def command_to_use(server: Server, gaining: list[GpuPlan], written: tuple[Written, ...], out: Path) -> str:
    """The command that makes the server read what was written; empty where nothing was."""
    if not written:
        return ""
    if server.directory_variable is not None:
        return f"export {server.directory_variable}={shlex.quote(str(out.absolute()))}"
    # A release that reads no variable: the files go where it looks first.
    folder = gaining[0].files[0].lookup.candidates[0].rpartition("/")[0]
    return shlex.join(["cp", *(str(file.path) for file in written), folder])


_NOT_FOR_MEASURING = frozenset({"model", "gpu", "compute_capability", "offline"})
_FLAGS = {"server_environment": "--server-env"}
_NEGATIVE = {"gated": "--no-gated", "flashinfer": "--no-flashinfer"}
_TEXTS: Mapping[str, Callable[[Any], list[str]]] = {
    "m": lambda keys: [",".join(f"{m}:{weight:g}" for m, weight in keys)],
    "server_environment": lambda pairs: [f"{name}={value}" for name, value in pairs.items()],
}


def measure_command(request: Request) -> str:
    """The command that measures the same on a machine with the GPU."""
    words = ["moetune", "tune"]
    if request.model is not None:
        words.append(request.model)
    changed = request.changed()
    for item in fields(Request):
        if item.name not in changed or item.name in _NOT_FOR_MEASURING:
            continue
        value = changed[item.name]
        flag = _FLAGS.get(item.name, f"--{item.name.replace('_', '-')}")
        if isinstance(value, bool):
            words.append(flag if value else _NEGATIVE[item.name])
        else:
            for text in _TEXTS.get(item.name, lambda value: [str(value)])(value):
                words += [flag, text]
    return shlex.join(words)
