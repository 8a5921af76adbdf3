"""What will run, what it will look for, what is there already, and what tuning would gain."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from moetune import __version__
from moetune.applications.catalogue import nearby
from moetune.applications.checkpoints import resolve
from moetune.applications.environment import (
    SERVERS,
    Installed,
    config_trees,
    find_installed,
)
from moetune.applications.predicting import NothingFitsError, Predicted, forecast, keys_for
from moetune.domain.codec import to_json
from moetune.domain.errors import ServerError, UnknownGpuError
from moetune.domain.gpu import Gpu, find_gpu
from moetune.domain.identity import fingerprint, problem_to_json
from moetune.domain.problem import KERNELS
from moetune.servers.other_kernel import cuda_kernel_until
from moetune.servers.protocol import Applies, Server
from moetune.servers.registry import open_server

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moetune.applications.catalogue import Nearby
    from moetune.applications.request import Request
    from moetune.domain.config import KernelConfig
    from moetune.domain.model import ExpertLayer
    from moetune.domain.problem import Kernel, Parallelism, Problem
    from moetune.servers.protocol import ConfigTree, Lookup, RunnerVerdict, ServerOptions

SCHEMA = "moetune.plan/1"
Predictor = Callable[["Request", Server, "Problem"], Predicted]
"""Makes the tables of a problem."""

_NEARBY = 3  # files of siblings that are shown for each kernel


@dataclass(frozen=True, slots=True)
class ServerChoice:
    """The release of a server that is meant, and how it came to be meant.

    Attributes:
        directory_variable: variable that names a directory of tuned files; None where there is none.
        directory: its value here; None when it is not set.
        shipped: where the shipped files are known from: `installed`, `published wheel` or `unknown`.
        assumed: what nobody said and moetune took, in words.
    """

    name: str
    version: str
    triton_version: str
    directory_variable: str | None
    directory: str | None
    shipped: str
    assumed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file that the server looks for.

    Attributes:
        path: below the directory that the server's variable can name.
        lookup: what the server's own lookup does as things stand.
        nearby: published files of this GPU, its siblings and neighbouring shapes, nearest first.
    """

    kernel: Kernel
    path: str
    lookup: Lookup
    nearby: tuple[Nearby, ...]

    def to_json(self) -> dict[str, Any]:
        """As it stands in the documents of `plan` and `tune`."""
        nearby = [
            {
                "path": near.path,
                "gpu": near.sibling.gpu.torch_name,
                "reason": near.sibling.reason,
                "confidence": near.sibling.confidence,
            }
            for near in self.nearby
        ]
        lookup = to_json(self.lookup)
        return {"kernel": self.kernel, "path": self.path, "lookup": lookup, "nearby": nearby}


@dataclass(frozen=True, slots=True)
class DefaultRegime:
    """The server's built-in default for a stretch of m.

    Attributes:
        first_m: of the stretch.
        last_m: of the stretch; None: it never ends.
        up: config of the up kernel.
        down: config of the down kernel, as a rule the same.
    """

    first_m: int
    last_m: int | None
    up: KernelConfig
    down: KernelConfig

    def to_json(self) -> dict[str, Any]:
        """As it stands in the documents of `plan` and `tune`."""
        configs = {"up": self.up.to_json(), "down": self.down.to_json()}
        return {"first_m": self.first_m, "last_m": self.last_m, **configs}


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """What holds for one kind of GPU.

    Attributes:
        device_name: as the server spells the GPU.
        runner: which MoE runner the server chooses there.
        applicable: tuned files matter there, as far as is known or was said.
        problem: None where the server has no such Triton kernel.
        files: what the server looks for; the down kernel only where it has a file of its own.
        defaults: what the server falls back to where it finds none of them.
        cuda_kernel_until: the last m at which the server runs a CUDA kernel of its own; 0: at none.
        predicted: None where nothing can be tuned.
        reason: why nothing can be tuned; empty where it can.
    """

    gpu: Gpu
    device_name: str
    runner: RunnerVerdict
    applicable: bool
    problem: Problem | None
    files: tuple[PlannedFile, ...]
    defaults: tuple[DefaultRegime, ...]
    predicted: Predicted | None
    reason: str = ""
    cuda_kernel_until: int = 0

    @property
    def gains(self) -> bool:
        """Whether tuned files are predicted to be faster than the server's default."""
        return self.predicted is not None and self.predicted.choices.improves

    def to_json(self) -> dict[str, Any]:
        """As it stands in the documents of `plan` and `tune`."""
        return {
            "gpu": to_json(self.gpu),
            "device_name": self.device_name,
            "runner": to_json(self.runner),
            "applicable": self.applicable,
            "reason": self.reason,
            "problem": None if self.problem is None else problem_to_json(self.problem),
            "fingerprint": None if self.problem is None else fingerprint(self.problem),
            "files": [file.to_json() for file in self.files],
            "cuda_kernel_until": self.cuda_kernel_until,
            "defaults": [regime.to_json() for regime in self.defaults],
            "predicted": None if self.predicted is None else self.predicted.to_json(),
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer to `moetune plan`.

    Attributes:
        layer: the expert layer as it was read.
        parallelism: how it is split.
        server: the release that is meant.
        gpus: one part for each kind of GPU.
    """

    layer: ExpertLayer
    parallelism: Parallelism
    server: ServerChoice
    gpus: tuple[GpuPlan, ...]

    @property
    def gains(self) -> bool:
        """Whether there is something to gain on any of the GPUs."""
        return any(part.gains for part in self.gpus)

    def content(self) -> dict[str, Any]:
        """What the documents of `plan` and `tune` have in common."""
        return {
            "moetune": __version__,
            "kind": "predicted",
            "gains": self.gains,
            "model": to_json(self.layer),
            "parallelism": to_json(self.parallelism),
            "server": to_json(self.server),
            "gpus": [part.to_json() for part in self.gpus],
        }

    def to_json(self) -> dict[str, Any]:
        """The document of `moetune plan --json`."""
        return {"schema": SCHEMA, **self.content()}


def predict(request: Request, server: Server, problem: Problem) -> Predicted:
    """Predicted tables of a problem.

    Raises:
        NothingFitsError: when no config can run at all.
    """
    keys = keys_for(server, problem, request.max_m, request.traffic)
    return forecast(server, problem).tables(keys, keys.ms[-1])


def make_plan(
    request: Request, environ: Mapping[str, str] | None = None, predictor: Predictor = predict
) -> Plan:
    """Answer a request without writing anything.

    Args:
        request: what is asked.
        environ: the variables of the server; None takes those of this process.
        predictor: where tables come from.

    Raises:
        MoetuneError: for what cannot be answered; each says what to do next.
    """
    environ = os.environ if environ is None else environ
    layer = resolve(request.model, offline=request.offline, overrides=request.overrides)
    server, installed, assumed = open_asked(request)
    trees = config_trees(server, environ, installed)
    gpus = asked_gpus(request)
    variable = server.directory_variable
    choice = ServerChoice(
        name=server.name,
        version=server.version,
        triton_version=server.triton_version,
        directory_variable=variable,
        directory=environ.get(variable) if variable else None,
        shipped="installed" if installed else "published wheel" if trees else "unknown",
        assumed=assumed,
    )
    parts = tuple(_plan_gpu(request, layer, server, trees, gpu, predictor) for gpu in gpus)
    return Plan(layer, request.parallelism, choice, parts)


def _plan_gpu(
    request: Request,
    layer: ExpertLayer,
    server: Server,
    trees: tuple[ConfigTree, ...],
    gpu: Gpu,
    predictor: Predictor,
) -> GpuPlan:
    options = request.server_options
    runner = server.runner(layer, request.parallelism, gpu, options)
    applicable = request.assume_triton or runner.applies in (Applies.YES, Applies.PARTLY)
    try:
        problem = server.problem(layer, request.parallelism, gpu, options)
        problem = replace(problem, routing=request.measured_routing, kernel_source=request.measured_kernel)
    except ServerError:
        # A dtype that the server's Triton kernel lacks: no matter where another runner does the work.
        if applicable:
            raise
        problem = None
    files = () if problem is None else _files(server, problem, trees, options)
    defaults = () if problem is None else _defaults(server, problem)
    predicted, reason = None, ""
    if problem is None or not applicable:
        reason = _refusal(runner)
    elif gpu.vendor != "NVIDIA":
        reason = f"for GPUs of {gpu.vendor} moetune knows names and lookups only"
    else:
        try:
            predicted = predictor(request, server, problem)
        except NothingFitsError as error:
            reason = error.message
    device_name = server.device_name(gpu)
    until = 0 if problem is None else cuda_kernel_until(server, problem)
    return GpuPlan(gpu, device_name, runner, applicable, problem, files, defaults, predicted, reason, until)


def _refusal(runner: RunnerVerdict) -> str:
    if runner.applies is Applies.NO:
        return f"the runner is {runner.runner}, which does not read the tuned files"
    return "no rule is known for the runner of this checkpoint on this GPU"


def _files(
    server: Server, problem: Problem, trees: tuple[ConfigTree, ...], options: ServerOptions
) -> tuple[PlannedFile, ...]:
    return tuple(
        PlannedFile(
            kernel=kernel,
            path=server.file_path(problem, kernel),
            lookup=server.lookup(problem, kernel, trees, options),
            nearby=tuple(islice(nearby(server, problem, kernel, trees), _NEARBY)),
        )
        for kernel in KERNELS
        if kernel == "up" or server.separate_down_file
    )


def _defaults(server: Server, problem: Problem) -> tuple[DefaultRegime, ...]:
    until = cuda_kernel_until(server, problem)
    switches = [switch for switch in server.default_switches(problem) if switch > until]
    firsts = (until + 1, *(switch + 1 for switch in switches))
    return tuple(
        DefaultRegime(first, last, *(server.default_config(problem, kernel, first) for kernel in KERNELS))
        for first, last in zip(firsts, (*switches, None), strict=True)
    )


def open_asked(request: Request) -> tuple[Server, Installed | None, tuple[str, ...]]:
    """The server that is meant, its package when it is that one, and what was assumed."""
    assumed = []
    name = request.server
    if name is None:
        here = [server for server in SERVERS if find_installed(server) is not None]
        name = here[0] if here else SERVERS[0]
        why = "installed here" if here else "no server is installed here"
        assumed.append(f"--server {name}: {why}")
    package = find_installed(name.strip().lower()) if name.strip().lower() in SERVERS else None
    version = request.server_version or (package.version if package is not None else None)
    meant = package if package is not None and package.version == version else None
    triton = request.triton_version
    if triton is None and meant is not None:
        installed_triton = find_installed("triton")
        triton = installed_triton.version if installed_triton is not None else None
    server = open_server(name, version, triton)
    if version is None:
        assumed.append(f"--server-version {server.version}: the newest whose rules moetune knows")
    if triton is None:
        assumed.append(f"--triton-version {server.triton_version}: what {server.name} {server.version} pins")
    return server, meant, tuple(assumed)


def asked_gpus(request: Request) -> tuple[Gpu, ...]:
    """The GPUs that are meant: those named, else those of this machine, each kind once.

    Raises:
        UnknownGpuError: for a name that the registry lacks, and where there are none.
    """
    if request.gpu_names:
        found = [find_gpu(name, compute_capability=request.compute_capability) for name in request.gpu_names]
        return tuple({gpu.torch_name: gpu for gpu in found}.values())
    from moetune.applications.nvml import detect_gpus, kinds

    detected = detect_gpus()
    if not detected.devices:
        why = "; ".join(detected.reasons) or "none was found"
        raise UnknownGpuError(f"no GPU is named, and this machine has none: {why}", 'add --gpu "NVIDIA H200"')
    return tuple(devices[0].gpu for devices in kinds(detected.devices).values())
