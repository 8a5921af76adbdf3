"""The command that makes a looked-up file: model, split and dtype solved backwards from its name."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moetune.applications.doctor_commands import (
    argument_command,
    by_hand_command,
    server_words,
    tune_command,
    with_model_command,
)
from moetune.applications.doctor_solve import (
    gpu_of,
    guess_model,
    models_that_fit,
    packaged_layer,
    quant_name,
    solve,
)

if TYPE_CHECKING:
    from moetune.applications.doctor_records import ServerFacts, Shape
    from moetune.applications.doctor_solve import Fit, Known, ModelGuess, VersionGuess
    from moetune.domain.gpu import Gpu
    from moetune.domain.model import ExpertLayer
    from moetune.servers.protocol import Server

_MAX_LISTED = 6
_MAX_FITTING = 4


@dataclass(frozen=True, slots=True)
class Job:
    """What it takes to make one file.

    Attributes:
        command: to paste; `moetune doctor ... --model` where the model is not known.
        facts: how it was found.
    """

    command: str
    facts: tuple[tuple[str, str], ...] = ()


class Jobs:
    """Finds the job of each file; up and down files of one shape are one job.

    Args:
        facts: of the server.
        server: its release.
        version: how that release is known.
        known: what a person says beside the logs.
        logs: their names, for commands.
    """

    def __init__(
        self,
        facts: ServerFacts,
        server: Server,
        version: VersionGuess,
        known: Known,
        logs: tuple[str, ...],
    ) -> None:
        self._facts, self._server, self._version = facts, server, version
        self._known, self._logs = known, logs
        self._jobs: dict[str, Job] = {}

    def of(self, shape: Shape) -> Job:
        """The job that makes the file of a shape."""
        key = shape.name.file.replace("_down.json", ".json")
        if key not in self._jobs:
            self._jobs[key] = self._make(shape)
        return self._jobs[key]

    def model(self, shape: Shape) -> ModelGuess:
        """The model of the start that a shape belongs to."""
        return guess_model(shape.start or self._facts.start, self._known)

    def ask_for_model(self) -> str:
        """The command to run where nothing names the model."""
        return with_model_command(self._logs, packaged_layer(""))

    def borrow_installed(self, shape: Shape) -> str:
        """The command that carries over the whole installed tree."""
        gpu, _ = gpu_of(shape.name.device, self._known)
        words = server_words(self._server, self._version, gpu, self._known.compute_capability)
        return shlex.join(["moetune", "borrow", "--installed", *words])

    def _make(self, shape: Shape) -> Job:
        gpu, registered = gpu_of(shape.name.device, self._known)
        facts: list[tuple[str, str]] = []
        if not registered:
            facts.append(("GPU", f"{gpu.torch_name} is not in the registry: add --compute-capability X.Y"))
        model = self.model(shape)
        if model.layer is None and model.name:
            return self._by_arguments(model.name, shape, gpu, facts)
        if model.layer is None:
            return self._nameless(shape, gpu, facts)
        if model.note:
            facts.append(("model", model.note))
        start = shape.start or self._facts.start
        candidates = [model]
        draft = packaged_layer(start.text("speculative_draft_model_path") if start is not None else "")
        candidates += [draft] if draft.layer is not None else []
        for candidate in candidates:
            layer = candidate.layer
            fits = () if layer is None else solve(shape, layer, self._server, gpu, start)
            if layer is not None and fits:
                facts.append(("solved", _solved(shape, candidate.name, fits)))
                command = self._tune(candidate.name, fits[0], gpu, layer)
                return Job(self._of_vendor(command, gpu, facts), tuple(facts))
        name = shape.name
        facts.append(("solved", f"no split of {model.name} gives E={name.E}, N={name.N}: by hand then"))
        command = by_hand_command(
            name,
            model.layer,
            quant_name(name),
            server_words(self._server, self._version, gpu, self._known.compute_capability),
            self._facts,
        )
        return Job(self._of_vendor(command, gpu, facts), tuple(facts))

    def _of_vendor(self, command: str, gpu: Gpu, facts: list[tuple[str, str]]) -> str:
        """For other vendors than NVIDIA there are names, lookups and borrowing only."""
        if gpu.vendor == "NVIDIA":
            return command
        facts.append(("GPU", f"for {gpu.vendor} nothing is tuned here: plan shows the files of its siblings"))
        words = shlex.split(command)
        return shlex.join(["moetune", "plan", *words[2:-2]])

    def _tune(self, model: str, fit: Fit, gpu: Gpu, layer: ExpertLayer | None) -> str:
        words = server_words(self._server, self._version, gpu, self._known.compute_capability)
        return tune_command(model, fit, self._server, words, gpu, self._facts, layer)

    def _by_arguments(self, model: str, shape: Shape, gpu: Gpu, facts: list[tuple[str, str]]) -> Job:
        facts.append(("model", "not packaged, and doctor opens no path of a log: split as the log says"))
        words = server_words(self._server, self._version, gpu, self._known.compute_capability)
        command = argument_command(model, words, self._facts, quant_name(shape.name))
        return Job(self._of_vendor(command, gpu, facts), tuple(facts))

    def _nameless(self, shape: Shape, gpu: Gpu, facts: list[tuple[str, str]]) -> Job:
        fitting = models_that_fit(shape, self._server, gpu)
        for name, fit in fitting[:_MAX_FITTING]:
            facts.append(("would fit", f"{name}, {fit.text}"))
        if len(fitting) > _MAX_FITTING:
            facts.append(("would fit", f"and {len(fitting) - _MAX_FITTING} more of the packaged checkpoints"))
        facts.append(("model", "the log does not name it"))
        if len(fitting) != 1:
            return Job(self.ask_for_model(), tuple(facts))
        facts[-1] = ("model", "the log does not name it: this is the only packaged one that gives the file")
        name, fit = fitting[0]
        command = self._tune(name, fit, gpu, packaged_layer(name).layer)
        return Job(self._of_vendor(command, gpu, facts), tuple(facts))


def _solved(shape: Shape, model: str, fits: tuple[Fit, ...]) -> str:
    listed = "; ".join(dict.fromkeys(fit.text for fit in fits[:_MAX_LISTED]))
    several = "" if len(fits) == 1 else f" ({len(fits)} answers fit; they give the same file)"
    quant = f", {fits[0].quant}" if fits[0].quant else ""
    return f"{model} with {listed}{quant} gives E={shape.name.E}, N={shape.name.N}{several}"
