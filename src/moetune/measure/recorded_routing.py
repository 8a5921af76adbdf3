"""Where the routings of a measuring process come from: a law, or what a real server did."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moetune.domain.errors import InputError
from moetune.domain.recording import PREFIX, Recording
from moetune.domain.synthetic_routing import skew_of
from moetune.measure.alignment import ELSEWHERE
from moetune.measure.routing import draw

if TYPE_CHECKING:
    from moetune.domain.problem import Problem
    from moetune.measure.protocol import Workload


class Routings:
    """Draws routings of one problem.

    Args:
        problem: the problem.
        recording: what `recorded:ID` means; None where nothing was recorded.
    """

    def __init__(self, problem: Problem, recording: Recording | None = None) -> None:
        self._problem = problem
        self._name = "" if recording is None else recording.routing
        self._layers = [] if recording is None else _routed_columns(problem, recording)

    @classmethod
    def of(cls, workload: Workload) -> Routings:
        """Those of a workload.

        Raises:
            InputError: when its recording is not the one that the problem names.
        """
        problem = workload.problem
        if not problem.routing.startswith(PREFIX):
            return cls(problem)
        if not workload.recording:
            raise InputError(f"the recording of the routing {problem.routing} was not handed over")
        path = Path(workload.recording)
        recording = Recording.from_bytes(path.read_bytes(), str(path))
        if recording.routing != problem.routing:
            raise InputError(f"{path.name} holds {recording.routing}, not {problem.routing}")
        return cls(problem, recording)

    def draw(self, m: int, routing: str, generator: torch.Generator) -> torch.Tensor:
        """Draw a routing of m tokens.

        Args:
            m: tokens.
            routing: `uniform`, `zipf:S` or `recorded:ID`.
            generator: decides, and says on which device.

        Returns:
            `[m, topk]` int64, experts of this rank by number, ELSEWHERE for those of other ranks.
        """
        if not routing.startswith(PREFIX):
            return draw(self._problem, m, skew_of(routing), generator)
        if routing != self._name:
            raise InputError(f"the routing {routing} is not the one that was recorded here")
        return self._recorded(m, generator)

    def _recorded(self, m: int, generator: torch.Generator) -> torch.Tensor:
        """Whole rows that follow one another in one layer, which and from where is drawn.

        Where a layer has fewer rows than m, it is passed through again from its beginning. Under expert
        parallelism the rank is drawn too: one table serves all of them.
        """
        problem, device = self._problem, generator.device
        layer = self._layers[_below(len(self._layers), generator)]
        rows = len(layer)
        start = _below(rows - m + 1, generator) if rows >= m else _below(rows, generator)
        ids = layer[(start + torch.arange(m)) % rows].to(device=device, dtype=torch.int64)
        here, shared = problem.routed_experts, problem.fused_shared_experts
        ranks = max(problem.global_experts // here, 1)
        if ranks > 1:
            ids = ids - here * _below(ranks, generator)
            ids = torch.where((ids >= 0) & (ids < here), ids, ELSEWHERE)
        if shared:
            own = torch.arange(here, here + shared, device=device).expand(m, shared)
            ids = torch.cat([ids, own], dim=1)
        return ids


def _below(count: int, generator: torch.Generator) -> int:
    return int(torch.randint(count, (1,), generator=generator, device=generator.device))


def _routed_columns(problem: Problem, recording: Recording) -> list[torch.Tensor]:
    """The columns of routed experts: fused shared ones are appended anew, as the server does it."""
    routed = problem.topk - problem.fused_shared_experts
    return [
        torch.from_numpy(layer.ids[:, :routed].copy()) for layer in recording.layers if layer.ids is not None
    ]
