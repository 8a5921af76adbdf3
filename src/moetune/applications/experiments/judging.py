"""What the finished starts of an arm say of it: validity first, then numbers, and never one for the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moetune.applications.experiments.command_line import arm_command
from moetune.applications.experiments.flag_rules import declared_of, proof_rules
from moetune.applications.experiments.known_good import touches_files
from moetune.applications.experiments.validity import check_arm
from moetune.domain.decision import judge
from moetune.domain.errors import InputError
from moetune.domain.experiment import Arm, Ending, Judgement, Proof, Validity, Verdict
from moetune.domain.experiment_plan import BASELINE, COMBINED

if TYPE_CHECKING:
    from moetune.applications.experiments.record import Facts, Finished
    from moetune.domain.experiment import ServerFacts, StartResult
    from moetune.domain.experiment_plan import Intervention, Plan, ServerPlan

_MOST_FAILURES = 2
_AT_ONCE = frozenset({Ending.DIED, Ending.CANNOT_INSTALL})
"""Endings that are not tried again: a server that dies under load would not be left in place anyway."""


@dataclass(frozen=True, slots=True)
class ArmStarts:
    """The starts of one arm, and of the baseline beside it.

    Attributes:
        arm: which one.
        starts: its own that are over.
        baseline: the baseline's of the same part of the experiment.
        prepared: its own that only filled caches.
        baseline_prepared: the baseline's that only filled caches.
    """

    arm: Arm
    starts: tuple[Finished, ...]
    baseline: tuple[Finished, ...]
    prepared: tuple[Finished, ...] = ()
    baseline_prepared: tuple[Finished, ...] = ()

    @property
    def failures(self) -> tuple[StartResult, ...]:
        """Starts that did not end well."""
        both = (*self.prepared, *self.starts)
        return tuple(one.result for one in both if one.result.ending is not Ending.DONE)

    @property
    def has_failed(self) -> bool:
        """Whether it is of no use to start it again."""
        failures = self.failures
        return len(failures) >= _MOST_FAILURES or any(one.ending in _AT_ONCE for one in failures)


def judge_arm(
    plan: Plan, of: ArmStarts, *, arms: int, planned_blocks: int, ends: bool, refused: str = ""
) -> Judgement:
    """What is known of an arm.

    Args:
        plan: the experiment.
        of: the starts that are over.
        arms: how many share alpha.
        planned_blocks: how often it may be started.
        ends: no start of it comes any more.
        refused: why it is never started; empty as a rule.
    """
    name = of.arm.name
    if refused:
        validity = Validity(proof=Proof.REFUSED, evidence=(refused,), problems=(refused,))
        return Judgement(name, Verdict.CANNOT_ACTIVATE, validity=validity, decided=True)
    validity = _validity(plan, of)
    if validity.proof is Proof.REFUSED:
        return Judgement(name, Verdict.CANNOT_ACTIVATE, validity=validity, decided=True)
    good = [one.result for one in of.starts if one.result.ending is Ending.DONE]
    if of.has_failed:
        return Judgement(name, Verdict.FAILED, validity=Validity(), notes=_failures(of), decided=True)
    baseline = [one.result for one in of.baseline if one.result.ending is Ending.DONE]
    if not good or not baseline:
        return Judgement(name, Verdict.INCONCLUSIVE, validity=Validity(), notes=_failures(of))
    judged = judge(of.arm.name, baseline, good, plan.decision, arms, planned_blocks, validity, ends=ends)
    return replace(judged, notes=(*judged.notes, *_failures(of)))


def _validity(plan: Plan, of: ArmStarts) -> Validity:
    ours, theirs = _facts(of.starts or of.prepared), _facts(of.baseline or of.baseline_prepared)
    if not ours or not theirs:
        return Validity()
    interventions = tuple(plan.intervention(name) for name in of.arm.interventions)
    server, version = plan.server.name, plan.server.version or theirs[0].version
    return check_arm(
        theirs,
        ours,
        interventions,
        declared=declared_of(server, version, interventions),
        proofs=proof_rules(server, version, interventions),
        server=server,
        version=version,
        installed=tuple(dict.fromkeys(path for one in of.starts for path in one.installed)),
    )


def _facts(starts: Sequence[Finished]) -> tuple[ServerFacts, ...]:
    """Of starts that ended well; of none that did, of those that show anything."""
    good = [one.result.facts for one in starts if one.result.ending is Ending.DONE]
    some = [one.result.facts for one in starts]
    return tuple(facts for facts in good or some if facts is not None)


def _failures(of: ArmStarts) -> tuple[str, ...]:
    failed = of.failures
    if not failed:
        return ()
    last = failed[-1]
    of_all = f"{len(failed)} of {len(of.starts) + len(of.prepared)} starts failed"
    return (f"{of_all}, the last one: {last.ending.value}: {last.reason}",)


class Judge:
    """Says what is known of arms. What did not change since it was last asked is not worked out again.

    Args:
        plan: the experiment.
        facts: what its record says, which only grows.
    """

    def __init__(self, plan: Plan, facts: Facts) -> None:
        self._plan, self._facts = plan, facts
        self._known: dict[tuple[object, ...], Judgement] = {}

    def all(self, before: int | None = None) -> tuple[Judgement, ...]:
        """Each arm, in the order of the plan; the last arm last.

        Args:
            before: look at the starts of earlier blocks only; None: at all.
        """
        facts = self._facts
        alone = self.alone(before, ends=facts.combined is not None)
        if facts.combined is None or len(facts.combined) < 2:
            return alone
        return (*alone, self.last(before, ends=facts.keeping is not None))

    def alone(self, before: int | None = None, *, ends: bool) -> tuple[Judgement, ...]:
        """Each intervention alone; `ends`: no start of one comes any more."""
        facts = self._facts
        planned = facts.size["planned"] if facts.size is not None else 1
        arms = [Arm(one.name, (one.name,)) for one in self._plan.interventions]
        tried = sum(arm.name not in facts.refused for arm in arms)
        return tuple(self._judge(starts_of(arm, facts, before), tried, planned, ends) for arm in arms)

    def last(self, before: int | None = None, *, ends: bool) -> Judgement:
        """All that helped, together; `ends`: no start of it comes any more."""
        facts = self._facts
        of = starts_of(Arm(COMBINED, facts.combined or ()), facts, before)
        return self._judge(of, facts.sharing_combined, facts.planned_combined, ends)

    def _judge(self, of: ArmStarts, arms: int, planned: int, ends: bool) -> Judgement:
        refused = self._facts.refused.get(of.arm.name, "")
        # Starts only come to the end of the record: as many are the same ones.
        counts = (len(of.starts), len(of.baseline), len(of.prepared), len(of.baseline_prepared))
        key = (of.arm, *counts, arms, planned, ends, refused)
        if key not in self._known:
            self._known[key] = judge_arm(
                self._plan, of, arms=arms, planned_blocks=planned, ends=ends, refused=refused
            )
        return self._known[key]


def starts_of(arm: Arm, facts: Facts, before: int | None = None) -> ArmStarts:
    """The starts of an arm, and the baseline's of the same part: alone, or all that helped together."""
    last = arm.name == COMBINED
    part = [
        one
        for one in facts.starts
        if facts.combined is None or (one.result.start.block >= facts.first_combined) == last
    ]
    counted = [
        one for one in part if not one.preparing and (before is None or one.result.start.block < before)
    ]
    return ArmStarts(
        arm,
        tuple(one for one in counted if one.result.start.arm == arm.name),
        tuple(one for one in counted if one.result.start.arm == BASELINE),
        tuple(one for one in part if one.preparing and one.result.start.arm == arm.name),
        tuple(one for one in facts.starts if one.preparing and one.result.start.arm == BASELINE),
    )


def compatible(
    server: ServerPlan, winners: Sequence[tuple[Intervention, float]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Which interventions can be on together: of those that get in each other's way, the best.

    Args:
        server: that they are on.
        winners: interventions that help, each with how much.

    Returns:
        Names of those that go together, in the order of `winners`, and why others are left out.
    """
    taken: list[Intervention] = []
    left = []
    for one, _ in sorted(winners, key=lambda pair: -pair[1]):
        try:
            arm_command(server, [*taken, one])
        except InputError as error:
            left.append(f"{one.name} is not in the last arm: {error.message}")
            continue
        rival = next((other for other in taken if touches_files(one) and touches_files(other)), None)
        if rival is None:
            taken.append(one)
        else:
            left.append(
                f"{one.name} is not in the last arm: it and {rival.name}, which gives more, are both about "
                "the config files"
            )
    names = {one.name for one in taken}
    return tuple(one.name for one, _ in winners if one.name in names), tuple(left)
