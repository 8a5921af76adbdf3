"""The performance model: what a config will take, and which are likely to win, without measuring.

Two heads look at the same features (features.py) and answer with the logarithm of a time over the
roofline floor. The time head learned from recorded landscapes, on few GPUs. The winner head learned
besides from the winners in published tuned files of many GPUs. Their mean is taken with a weight
that grows with the distance of the problem from the landscapes. Each head is an ensemble of small
networks: where its members disagree, nobody has measured.

The weights are made by `python -m training.train` and ship as plain arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from moetune.domain.familiarity import Familiarity
from moetune.domain.features import FEATURES, FloatArray, LaunchArrays, features, launch_arrays
from moetune.domain.gpu import Gpu, filled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moetune.domain.features import Work
    from moetune.domain.launch import Launch
    from moetune.domain.problem import Kernel, Problem

FIRST_FEW = 256
"""Launches that all members of the ensembles look at; the others are ranked by one of each head."""
SPREAD_PENALTY = 0.5
"""Standard deviations over the members by which a config is put back."""
_ALIKE_GPU, _OTHER_GPU, _OTHER_DTYPE = 0.3, 1.0, 0.5
_SHAPE_SCALE = np.array([4.0, 3.0, 2.0, 3.0])
_NEAR_SHAPE = 0.5
_MIN_LOG, _MAX_LOG = -1.0, 7.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predictions for n configs of one kernel at one m.

    Attributes:
        time_us: `[n]` predicted time with cold weights, in microseconds.
        score: `[n]` what to rank by, lower is better: the time, worse where the members disagree.
        limits: for each config the resource that limits it: `memory`, `tensor cores`, `latency`.
        scenarios_us: `[members, n]` the time as each member of the ensembles sees it.
    """

    time_us: FloatArray
    score: FloatArray
    limits: tuple[str, ...]
    scenarios_us: FloatArray


PARTS = ("w1", "b1", "w2", "b2", "w3", "b3", "low", "high")
"""Arrays of an ensemble, as the artifact names them."""


@dataclass(frozen=True, slots=True)
class Ensemble:
    """Networks of two hidden layers, evaluated together.

    Attributes:
        w1: `[F, members * H]`, b1: `[members * H]`.
        w2: `[members, H, H]`, b2: `[members, 1, H]`.
        w3: `[members, H]`, b3: `[members, 1]`.
        low, high: `[F]` range of the inputs that the networks have seen. What lies outside is taken
            for its nearest end: an instruction or a type that was never seen counts as the one most
            like it, and its physics (bytes, rates, tiles) still tell it apart.
    """

    w1: NDArray[np.float32]
    b1: NDArray[np.float32]
    w2: NDArray[np.float32]
    b2: NDArray[np.float32]
    w3: NDArray[np.float32]
    b3: NDArray[np.float32]
    low: NDArray[np.float32]
    high: NDArray[np.float32]

    @property
    def members(self) -> int:
        """Networks in the ensemble."""
        return len(self.w2)

    def __call__(self, inputs: NDArray[np.float32], members: int | None = None) -> FloatArray:
        """Answers of the first `members` networks (all by default) for `[n, F]` inputs: `[members, n]`."""
        count = members or self.members
        width = self.w2.shape[1]
        hidden = np.clip(inputs, self.low, self.high) @ self.w1[:, : count * width]
        hidden += self.b1[: count * width]
        np.maximum(hidden, 0.0, out=hidden)
        answers = []
        for member in range(count):
            second = hidden[:, member * width : (member + 1) * width] @ self.w2[member]
            second += self.b2[member]
            np.maximum(second, 0.0, out=second)
            answers.append(second @ self.w3[member] + self.b3[member])
        stacked: FloatArray = np.stack(answers).astype(np.float64).clip(_MIN_LOG, _MAX_LOG)
        return stacked


@dataclass(frozen=True, slots=True)
class Ground:
    """What the landscapes cover.

    Attributes:
        shapes: `[n, 4]` of log2 of E, N, K and topk.
        dtypes: `[n]` as `dtype_tag` names them.
        gpus: `[n]` names of the GPUs.
        compute_capabilities: `[n]` as `9.0`.
    """

    shapes: FloatArray
    dtypes: tuple[str, ...]
    gpus: tuple[str, ...]
    compute_capabilities: tuple[str, ...]


def dtype_tag(problem: Problem) -> str:
    """The type of the GEMM as the model tells types apart: `bf16`, `fp8_w8a8+blocks`, `int4_w4a16+groups`.

    Scales for each channel or for a whole tensor come after the sum, and are no other type.
    """
    quantization = problem.quantization
    dtype = quantization.dtype.value
    dtype = "bf16" if dtype == "fp16" else dtype
    scales = "+blocks" if quantization.block_shape else "+groups" if quantization.group_size else ""
    return dtype + scales


def shape_of(problem: Problem) -> FloatArray:
    """log2 of E, N, K and topk, `[4]`."""
    return np.log2(np.array([problem.E, problem.N, problem.K, problem.topk], dtype=np.float64))


class PerformanceModel:
    """The performance model.

    Args:
        mean: `[F]` subtracted from the features.
        scale: `[F]` divided by afterwards.
        time_head: learned from landscapes.
        winner_head: learned from published winners besides.
        ground: what the landscapes cover.
    """

    def __init__(
        self, mean: FloatArray, scale: FloatArray, time_head: Ensemble, winner_head: Ensemble, ground: Ground
    ) -> None:
        self.mean, self.scale = mean, scale
        self.time_head, self.winner_head, self.ground = time_head, winner_head, ground
        self._arrays: dict[int, tuple[Sequence[Launch], LaunchArrays]] = {}

    @classmethod
    def load(cls) -> PerformanceModel:
        """Read the packaged artifact; it is read once a process."""
        return _packaged()

    @classmethod
    def read(cls, file: BinaryIO) -> PerformanceModel:
        """Read an artifact: arrays only, nothing in it can run."""
        with np.load(file, allow_pickle=False) as arrays:
            if tuple(arrays["features"].tolist()) != FEATURES:
                raise ValueError(
                    "the performance model was trained on other features: run `python -m training.train`"
                )
            time_head, winner_head = (
                Ensemble(*(arrays[f"{head}_{part}"].astype(np.float32) for part in PARTS))
                for head in ("time", "winner")
            )
            ground = Ground(
                arrays["ground_shapes"].astype(np.float64),
                tuple(arrays["ground_dtypes"].tolist()),
                tuple(arrays["ground_gpus"].tolist()),
                tuple(arrays["ground_compute_capabilities"].tolist()),
            )
            return cls(
                arrays["mean"].astype(np.float64),
                arrays["scale"].astype(np.float64),
                time_head,
                winner_head,
                ground,
            )

    def predict(self, problem: Problem, kernel: Kernel, m: int, launches: Sequence[Launch]) -> Prediction:
        """Predict the time of n launches of one kernel at one m.

        Raises:
            UnknownGpuError: when nothing is known of the GPU's architecture.
        """
        gpu = filled(problem.gpu)
        matrix, done = features(problem, kernel, m, self._columns(launches, problem.gpu), gpu)
        inputs = ((matrix - self.mean) / self.scale).astype(np.float32)
        weight = self.winner_weight(problem)
        if len(launches) > FIRST_FEW:
            quick = self.blend(inputs, weight, 1)[0]
            first = np.argpartition(quick, FIRST_FEW)[:FIRST_FEW]
            members = self.blend(inputs[first], weight, None)
            # What only one member saw is set off by what the others make of the first few.
            scenarios = np.tile(quick + float(np.median(members.mean(0) - quick[first])), (len(members), 1))
            scenarios[:, first] = members
        else:
            scenarios = self.blend(inputs, weight, None)
        log_time = scenarios.mean(0)
        score = log_time + SPREAD_PENALTY * scenarios.std(0)
        return Prediction(
            np.exp(log_time) * done.floor_us,
            np.exp(score) * done.floor_us,
            _limits(matrix, done),
            np.exp(scenarios) * done.floor_us,
        )

    def winner_weight(self, problem: Problem) -> float:
        """Weight of the winner head: 0 on known ground, 1 far from it."""
        return min(1.0, self.familiarity(problem).distance)

    def familiarity(self, problem: Problem) -> Familiarity:
        """Say how far the problem lies from known ground."""
        ground = self.ground
        gpu = problem.gpu
        capability = ".".join(map(str, gpu.compute_capability or ()))
        names = ", ".join(sorted(set(ground.gpus)))
        distance, parts = 0.0, []
        if gpu.torch_name not in ground.gpus:
            alike = capability in ground.compute_capabilities
            distance += _ALIKE_GPU if alike else _OTHER_GPU
            parts.append(
                f"measured on {names}, of the same architecture"
                if alike
                else f"nothing was measured on {gpu.sm or gpu.torch_name}, only on {names}"
            )
        tag = dtype_tag(problem)
        if tag not in ground.dtypes:
            distance += _OTHER_DTYPE
            parts.append(f"{tag} was not measured")
        spans = np.abs(ground.shapes - shape_of(problem)) / _SHAPE_SCALE
        nearest = float(spans.max(1).min()) if len(spans) else math.inf
        if nearest > _NEAR_SHAPE:
            distance += min(1.0, nearest - _NEAR_SHAPE)
            parts.append("no measured shape is near")
        if not parts:
            return Familiarity(0.0, f"known ground: shapes like this were measured on {names}")
        return Familiarity(round(distance, 3), "; ".join(parts))

    def _columns(self, launches: Sequence[Launch], gpu: Gpu) -> LaunchArrays:
        """Launches as columns; those of a search are asked for once for each m."""
        if gpu.compute_capability is None:
            filled(gpu)
        known = self._arrays.get(id(launches))
        if known is not None and known[0] is launches:
            return known[1]
        columns = launch_arrays(launches, gpu.compute_capability or (0, 0))
        if len(launches) > FIRST_FEW:
            if len(self._arrays) >= 8:
                self._arrays.clear()
            self._arrays[id(launches)] = (launches, columns)
        return columns

    def blend(self, inputs: NDArray[np.float32], weight: float, members: int | None = None) -> FloatArray:
        """Both heads with their weights, `[members, n]`: each member of one with the mean of the other."""
        if weight <= 0.0:
            return self.time_head(inputs, members)
        winner = self.winner_head(inputs, members)
        if weight >= 1.0:
            return winner
        time = self.time_head(inputs, members)
        pairs = [
            (1 - weight) * time[i % len(time)] + weight * winner[i % len(winner)]
            for i in range(max(len(time), len(winner)))
        ]
        return np.stack(pairs)


@lru_cache(maxsize=1)
def _packaged() -> PerformanceModel:
    path = resources.files("moetune.domain").joinpath("data").joinpath("performance_model.npz")
    with path.open("rb") as file:
        return PerformanceModel.read(file)  # type: ignore[arg-type]


_PADDED, _LATENCY = FEATURES.index("padded_compute_over_floor"), FEATURES.index("latency_over_floor")


def _limits(matrix: FloatArray, done: Work) -> tuple[str, ...]:
    """The largest of: each byte moved once, the padded arithmetic, and the loads that follow one another."""
    bounds = np.stack(
        [
            np.full(len(matrix), done.memory_us / done.floor_us),
            2.0 ** matrix[:, _PADDED],
            2.0 ** matrix[:, _LATENCY],
        ]
    )
    names = ("memory", "tensor cores", "latency")
    return tuple(names[place] for place in bounds.argmax(0))
