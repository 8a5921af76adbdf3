"""`moetune experiment --suggest`: what is here is taken where nothing is said, then a plan is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moetune import __version__
from moetune.applications.environment import SERVERS, find_installed
from moetune.applications.experiments.suggest import suggest
from moetune.applications.nvml import detect_gpus
from moetune.domain.errors import InputError

if TYPE_CHECKING:
    from moetune.applications.experiments.suggest import Suggestion

SCHEMA = "moetune.experiment-suggestion/1"


@dataclass(frozen=True, slots=True)
class SuggestedPlan:
    """A plan to start from.

    Attributes:
        suggestion: the plan, and what was left out.
    """

    suggestion: Suggestion

    @property
    def plan_text(self) -> str:
        """The plan's file."""
        return self.suggestion.text

    @property
    def arms(self) -> tuple[str, ...]:
        """Names of its interventions, simplest first."""
        return tuple(one.name for one in self.suggestion.plan.interventions)

    @property
    def left_out(self) -> tuple[tuple[str, str], ...]:
        """Arms that are not in it, and why."""
        return self.suggestion.left_out

    def to_json(self) -> dict[str, Any]:
        """The document of `moetune experiment --suggest --json`."""
        return {
            "schema": SCHEMA,
            "moetune": __version__,
            "arms": list(self.arms),
            "left_out": [{"arm": name, "reason": reason} for name, reason in self.left_out],
            "text": self.plan_text,
        }


def suggest_plan(
    model: str, *, server: str | None, server_version: str, gpu: str | None, tp: int, offline: bool
) -> SuggestedPlan:
    """Suggest a plan; the server and the GPU are those that are here where nothing is said.

    Raises:
        MoetuneError: for what is not known, or not here and not said.
    """
    here = [name for name in SERVERS if find_installed(name) is not None]
    name = server or (here[0] if len(here) == 1 else "")
    if not name:
        raise InputError("nothing says which server to suggest for", "add --server sglang or --server vllm")
    board = gpu or next((device.name for device in detect_gpus().devices), "")
    if not board:
        raise InputError("there is no GPU here to suggest for", 'add --gpu NAME, as in --gpu "NVIDIA H200"')
    return SuggestedPlan(
        suggest(model, gpu=board, server=name, version=server_version, tp=tp, offline=offline)
    )
