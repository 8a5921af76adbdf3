"""What is asked of a measured tuning."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moetune.applications.request import TuneRequest
from moetune.applications.routing_store import UNIFORM
from moetune.applications.server_kernels import AUTO
from moetune.applications.tuning_efforts import EFFORTS
from moetune.domain.errors import InputError
from moetune.domain.server_kernel import OWN

ONLY = ("up", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureRequest(TuneRequest):
    """A question whose answer is measured and written.

    Attributes:
        effort: `quick`, `full` or `exhaustive`.
        budget: seconds of wall clock; None takes the effort's own.
        devices: places of the GPUs that share the work, in the driver's order; empty takes the first.
        only: search this kernel alone; the pair is still checked.
        python: the interpreter that measures, of an environment with torch and Triton.
        state: where runs are kept; None takes MOETUNE_STATE, else the XDG state directory.
        share_gpu: go on although something else computes on the GPU.
        routing: `uniform`, `zipf:S`, or the files of a recording.
        kernel: which kernel is timed: `server`: the server's, of the environment that measures; `own`:
            moetune's; `auto`: the server's where it is there in the version that is tuned for.
        server_files: a folder with the Python files of a server, whose kernel is timed.
        kernel_source: what came of that choice; found out by measuring.
        seed: of data, routings and the order of measurements.
    """

    effort: str = "quick"
    budget: float | None = None
    devices: tuple[int, ...] = ()
    only: str | None = None
    python: str | None = None
    state: str | Path | None = None
    share_gpu: bool = False
    routing: str = UNIFORM
    kernel: str = AUTO
    server_files: str | Path | None = None
    kernel_source: str = OWN
    seed: int = 0

    def __post_init__(self) -> None:
        # Not super(): dataclasses with slots are made anew, and the name here is of the first one.
        TuneRequest.__post_init__(self)
        if self.effort not in EFFORTS:
            raise InputError(f"no effort is called {self.effort[:40]!r}", f"known are {', '.join(EFFORTS)}")
        if self.only is not None and self.only not in ONLY:
            raise InputError(f"no kernel is called {self.only[:40]!r}", f"give {' or '.join(ONLY)}")
        if self.budget is not None and not 0 < self.budget < 1e6:
            raise InputError("the budget is no number of seconds", "give it as in --budget 60")
        if len(set(self.devices)) < len(self.devices) or any(not 0 <= n < 1024 for n in self.devices):
            raise InputError("--devices names no GPUs", "give their numbers once each, as in 0,1")

    @property
    def measured_routing(self) -> str:
        """The routing of the problem."""
        return self.routing

    @property
    def measured_kernel(self) -> str:
        """The kernel source of the problem."""
        return self.kernel_source
