"""What an experiment would do, before anything is started: arms, commands, schedule, time, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moetune import __version__
from moetune.applications.experiments.pasting import pasteable
from moetune.applications.experiments.progress import Duration, duration_of
from moetune.applications.experiments.redaction import redacted_plan
from moetune.applications.experiments.size import Size
from moetune.domain.codec import to_json
from moetune.domain.experiment import ScheduledStart
from moetune.domain.experiment_plan import BASELINE
from moetune.domain.schedule import block_of

if TYPE_CHECKING:
    from moetune.applications.experiments.record import Finished
    from moetune.domain.experiment_plan import Intervention, Plan

SCHEMA = "moetune.experiment-outlook/1"


@dataclass(frozen=True, slots=True)
class ArmOutlook:
    """An arm that would be started.

    Attributes:
        name: of the arm.
        command: as it would be run, with its variables, quoted for a shell; secrets are redacted.
        configs: what would be put in place for it, or `taken away`.
    """

    name: str
    command: str
    configs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outlook:
    """What an experiment would do.

    Attributes:
        id: of the experiment.
        plan: without its secrets.
        arms: baseline first, those that are refused left out.
        refused: interventions that are never started, and why.
        problems: what else speaks against the plan, with its lines.
        schedule: the starts of the blocks, when nothing is decided early; without the last arm.
        size: how many blocks.
        preparing: starts that only fill caches.
        duration: of one start.
        finished: starts that an earlier call has finished.
    """

    id: str
    plan: Plan
    arms: tuple[ArmOutlook, ...]
    refused: tuple[tuple[str, str], ...]
    problems: tuple[str, ...]
    schedule: tuple[ScheduledStart, ...]
    size: Size
    preparing: int
    duration: Duration
    finished: int

    @property
    def most_starts(self) -> int:
        """Starts when nothing is decided early, with the last arm."""
        return self.size.most_starts + self.preparing

    @property
    def most_seconds(self) -> float:
        """How long the starts that are left take at most."""
        seconds = max(0, self.most_starts - self.finished) * self.duration.start_s
        limit = self.plan.budget.minutes * 60
        return min(seconds, limit) if limit else seconds

    def to_json(self) -> dict[str, Any]:
        """The document of `moetune experiment --dry-run --json`."""
        return {
            "schema": SCHEMA,
            "moetune": __version__,
            "id": self.id,
            "plan": to_json(self.plan),
            "arms": [to_json(one) for one in self.arms],
            "refused": [{"intervention": name, "reason": reason} for name, reason in self.refused],
            "problems": list(self.problems),
            "schedule": [to_json(one) for one in self.schedule],
            "proposed_blocks": self.size.proposed,
            "planned_blocks": self.size.planned,
            "preparing_starts": self.preparing,
            "most_starts": self.most_starts,
            "finished_starts": self.finished,
            "start_seconds": self.duration.start_s,
            "start_seconds_measured": self.duration.measured,
            "most_seconds": self.most_seconds,
        }


def outlook_of(
    plan: Plan,
    name: str,
    refused: Sequence[tuple[str, str]],
    problems: Sequence[str],
    size: Size,
    preparing: int,
    finished: Sequence[Finished],
) -> Outlook:
    """Make the outlook of a plan."""
    out = {intervention for intervention, _ in refused}
    tried = tuple(one for one in plan.interventions if one.name not in out)
    names = [one.name for one in tried]
    schedule = [start for block in range(size.planned) for start in block_of(names, block, plan.seed)]
    plain = redacted_plan(plan)
    shown = [one for one in plain.interventions if one.name not in out]
    return Outlook(
        id=name,
        plan=plain,
        arms=(_arm(plain, BASELINE, ()), *(_arm(plain, one.name, (one,)) for one in shown)),
        refused=tuple(refused),
        problems=tuple(problems),
        schedule=tuple(schedule),
        size=size,
        preparing=preparing,
        duration=duration_of(plan, finished),
        finished=len(finished),
    )


def _arm(plan: Plan, name: str, interventions: tuple[Intervention, ...]) -> ArmOutlook:
    configs = [path for one in interventions for path in one.configs]
    if any(one.without_configs for one in interventions):
        configs.append("the files that the server looks for are taken away")
    return ArmOutlook(name, pasteable(plan.server, interventions), tuple(configs))
