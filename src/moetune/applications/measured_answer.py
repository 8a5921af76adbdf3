"""The answer to `moetune tune` where it measured, and its document."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetune import __version__
from moetune.applications.provenance import rounded
from moetune.applications.rates import rate
from moetune.domain.codec import to_json

if TYPE_CHECKING:
    from moetune.applications.output import Written
    from moetune.applications.planning import Plan
    from moetune.applications.server_kernels import KernelChoice
    from moetune.applications.tuning_loop import Measured
    from moetune.domain.choose import Choice
    from moetune.measure.protocol import DeviceFacts

SCHEMA = "moetune.measured/1"


@dataclass(frozen=True, slots=True)
class MeasuredTuning:
    """The answer to `moetune tune` on a GPU.

    Attributes:
        plan: what `moetune plan` says of the GPU that was measured.
        measured: the tables, with their times.
        effort: how hard was tried.
        out: the directory below which files were written.
        files: the config files as they now stand; none where nothing is gained.
        nothing_left: the journal had everything.
        journal: where it is.
        landscape: what was measured as a landscape; only of an exhaustive run.
        throttled: why the GPU ran slower than it could at some time; empty when it did not.
        routing_remarks: what a person should know of the recording that was measured under.
        kernel: which kernel was timed, and why.
        facts: the GPU and the software that measured; None where nothing had to be measured.
        found: the server's own lookup, pointed to `out`, finds every file.
        replaces_shipped: pointed to `out`, the server no longer reads the files that it ships.
        use_command: what makes the server read the files.
        seconds: wall clock of this run.
    """

    plan: Plan
    measured: Measured
    effort: str
    out: Path
    files: tuple[Written, ...]
    nothing_left: bool
    journal: Path
    landscape: Path | None
    throttled: tuple[str, ...]
    routing_remarks: tuple[str, ...]
    kernel: KernelChoice
    facts: DeviceFacts | None
    found: bool
    replaces_shipped: bool
    use_command: str
    seconds: float

    @property
    def gains(self) -> bool:
        """Whether something beats the server's default by more than the noise."""
        return self.measured.choices.improves

    def to_json(self) -> dict[str, Any]:
        """The document of `moetune tune --json` where it measured."""
        part, measured = self.plan.gpus[0], self.measured
        assert part.problem is not None
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "moetune": __version__,
            "kind": "measured",
            "effort": self.effort,
            "gains": self.gains,
            "nothing_left": self.nothing_left,
            "model": to_json(self.plan.layer),
            "parallelism": to_json(self.plan.parallelism),
            "server": to_json(self.plan.server),
            "gpu": part.to_json()["gpu"],
            "fingerprint": part.to_json()["fingerprint"],
            "device": to_json(self.facts),
            "l2": "cold",
            "routing": part.problem.routing,
            "routing_remarks": list(self.routing_remarks),
            "kernel_source": part.problem.kernel_source,
            "kernel": to_json(self.kernel),
            "noise": measured.noise,
            "spread": measured.spread,
            "gain": measured.gain,
            "layer_gain": measured.layer_gain,
            "measured": measured.measured,
            "known": measured.known,
            "configs": dict(measured.configs),
            "compiled_while_measuring": measured.compilations,
            "failed": dict(measured.failed),
            "drifts": list(measured.drifts),
            "throttled": list(self.throttled),
            "peaks": to_json(measured.peaks),
            "complete": measured.complete,
            "added_keys": list(measured.added_keys),
            "shortfalls": list(measured.shortfalls),
            "entries": [self._entry(choice) for choice in measured.choices.entries],
            "numerics": [{**to_json(item), "config": item.config.to_json()} for item in measured.numerics],
            "journal": str(self.journal),
            "landscape": str(self.landscape) if self.landscape else None,
            "out": str(self.out),
            "written": [
                {
                    "path": str(file.path),
                    "provenance": str(file.provenance),
                    "state": file.state.value,
                    "shared_with": file.shared_with,
                }
                for file in self.files
            ],
            "found_by_lookup": self.found,
            "replaces_shipped": self.replaces_shipped,
            "use_command": self.use_command,
            "seconds": self.seconds,
        }
        rounded_document: dict[str, Any] = rounded(document)
        return rounded_document

    def _entry(self, choice: Choice) -> dict[str, Any]:
        layer = self.measured.layers.get(choice.m)
        problem = self.plan.gpus[0].problem
        assert problem is not None
        return {
            "rate": to_json(rate(problem, choice.m, choice.time_us, self.measured.peaks)),
            **choice.to_json(),
            "up": choice.pair.up.to_json(),
            "down": choice.pair.down.to_json(),
            "layer": None if layer is None else to_json(layer),
        }
