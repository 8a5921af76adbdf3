"""What the measuring process is asked and what it answers: one JSON object a line, on pipes.

A request is `{"op": NAME, "body": {...}}`, an answer `{"ok": {...}}` or `{"failure": {...}}`. Nothing
here imports torch: the process that asks may run in another environment than the one that measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from moetune.domain.codec import from_json, to_json
from moetune.domain.compilation import CompileTask
from moetune.domain.problem import Problem

PROTOCOL = 2
"""Raised with each change that a worker of another release would misunderstand."""


class FailureKind(str, Enum):
    """Whose fault a failure is, which decides what happens next."""

    CONFIG = "config"
    """The candidate's: it is never tried again."""
    MEMORY = "memory"
    """The GPU's memory is short: nothing is said about the candidate."""
    DEVICE = "device"
    """The CUDA context is lost. The worker ends; the candidate that it worked on is the culprit."""
    SETUP = "setup"
    """The environment cannot measure at all."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request was not answered.

    Attributes:
        kind: whose fault it is.
        message: one line.
    """

    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The GPU that a worker holds, and the software that it measures with."""

    name: str
    uuid: str
    compute_capability: str
    sm_count: int
    l2_bytes: int
    memory_total_bytes: int
    memory_free_bytes: int
    torch: str
    triton: str
    protocol: int = PROTOCOL


@dataclass(frozen=True, slots=True)
class Workload:
    """What a worker holds in the GPU's memory.

    Attributes:
        problem: the problem.
        ms: every m that will be asked for.
        seed: of the data and of the routings.
        recording: path of the recording that the problem's routing names, as moetune keeps it.
    """

    problem: Problem
    ms: tuple[int, ...]
    seed: int = 0
    recording: str = ""


@dataclass(frozen=True, slots=True)
class Opened:
    """What a worker allocated.

    Attributes:
        bytes: all of it.
        up_copies: copies of the up weights, so that they are cold where one would fit in the L2.
        down_copies: likewise.
    """

    bytes: int
    up_copies: int
    down_copies: int


@dataclass(frozen=True, slots=True)
class TimeTask:
    """Time one binary at one m.

    Attributes:
        task: the binary.
        m: tokens.
        give_up_us: after two samples above it no more are taken: the candidate is hopeless. 0: never.
        clear_us: a few samples that are all above it are enough: the candidate cannot win. 0: never.
        tolerance: relative half-width of the interval of the median at which no more samples are taken.
        least_samples: at least so many.
        most_samples: at most so many.
    """

    task: CompileTask
    m: int
    give_up_us: float = 0.0
    tolerance: float = 0.005
    least_samples: int = 5
    most_samples: int = 15
    clear_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Timed:
    """What came of it.

    Attributes:
        time_us: median of the samples, of one launch, less what stands between two launches.
        between_us: the tiny kernel between two launches, timed on its own.
        spread: relative half-width of the 95% interval of that median.
        samples: how many.
        launches: launches in the graph, each on a routing of its own.
        copies: copies of the weights among which they rotate.
        reuse_bytes: least bytes of weights that are touched between two uses of the same weights.
        l2_bytes: of the GPU; the least reuse is at least three times that, or nothing is timed.
        hopeless: it was given up after two samples, or two launches without a graph where one is long.
        compilations: kernels that this worker had to compile itself since it was started.
    """

    time_us: float
    spread: float
    samples: int
    launches: int
    copies: int
    reuse_bytes: int
    l2_bytes: int
    hopeless: bool = False
    compilations: int = 0
    between_us: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerPair:
    """The binaries of both kernels at one m."""

    up: CompileTask
    down: CompileTask


@dataclass(frozen=True, slots=True)
class LayerTask:
    """Time pairs through the whole layer, interleaved on the same fresh routings.

    Attributes:
        m: tokens.
        pairs: the contestants; one may stand there twice, for the noise.
        routing: `uniform`, `zipf:S`, or the `recorded:ID` of the workload.
        rounds: samples of each.
        seed: of the routings.
    """

    m: int
    pairs: tuple[LayerPair, ...]
    routing: str = "uniform"
    rounds: int = 11
    seed: int = 1


@dataclass(frozen=True, slots=True)
class LayerTimed:
    """What came of it.

    Attributes:
        samples_us: for each pair one of each round, of one pass through the layer.
        reuse_bytes: least bytes of weights that are touched between two uses of the same weights.
        compilations: as in `Timed`.
    """

    samples_us: tuple[tuple[float, ...], ...]
    reuse_bytes: int = 0
    compilations: int = 0


@dataclass(frozen=True, slots=True)
class CheckTask:
    """Compare a binary with the fp32 reference at one m, its output poisoned before."""

    task: CompileTask
    m: int
    seed: int = 2


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of it.

    Attributes:
        relative_error: norm of the difference over that of the reference; infinite where something of
            the output was not written.
        tolerance: what it may be.
    """

    relative_error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the numbers are right; what is not finite is wrong."""
        return self.relative_error <= self.tolerance


@dataclass(frozen=True, slots=True)
class PeakTask:
    """Measure what the GPU can do: nothing to say."""

    seed: int = 0


@dataclass(frozen=True, slots=True)
class Peaks:
    """Measured rates of the GPU: a large product of matrices, and the faster of reading and copying a lot."""

    tflops: float
    gbps: float


REQUESTS: dict[str, tuple[type, type]] = {
    "open": (Workload, Opened),
    "time": (TimeTask, Timed),
    "layer": (LayerTask, LayerTimed),
    "check": (CheckTask, Checked),
    "peaks": (PeakTask, Peaks),
}
"""Operation to what it takes and what it gives."""


def request_json(body: object) -> dict[str, Any]:
    """The line of a request."""
    name = next(name for name, (kind, _) in REQUESTS.items() if type(body) is kind)
    return {"op": name, "body": to_json(body)}


def read_request(document: dict[str, Any]) -> object:
    """Read what `request_json` wrote."""
    return from_json(REQUESTS[document["op"]][0], document["body"], f"request {document['op']}")


def read_answer(body: object, document: dict[str, Any]) -> object:
    """Read the answer to a request: what its operation gives, or a Failure.

    Raises:
        InputError: for what is no answer.
    """
    kind = next(answer for request, answer in REQUESTS.values() if type(body) is request)
    if "failure" in document:
        return from_json(Failure, document["failure"], "the worker's answer")
    return from_json(kind, document.get("ok"), "the worker's answer")
