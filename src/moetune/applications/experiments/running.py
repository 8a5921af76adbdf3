"""The experiment: the known-good server against itself, each intervention against it, then all that helped.

Every decision is made from what the record holds, so that a killed run goes on where it stopped: a start
whose line is there is never repeated, and one that was only begun is begun again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from moetune.applications.experiments.far_configs import FarConfigs
from moetune.applications.experiments.flag_rules import proof_texts
from moetune.applications.experiments.judging import (
    Judge,
    compatible,
    starts_of,
)
from moetune.applications.experiments.known_good import ConfigArms, KnownGood
from moetune.applications.experiments.one_start import OneStart, StartOrder, Tools
from moetune.applications.experiments.progress import Progress, duration_of, spoken
from moetune.applications.experiments.record import Finished, Record
from moetune.applications.experiments.size import Size, preparing_starts, size_of
from moetune.domain.codec import from_json, to_json
from moetune.domain.decision import arms_of_last, proposed_blocks
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.experiment import HIGHER_IS_BETTER, Arm, Ending, Judgement, ScheduledStart, Verdict
from moetune.domain.experiment_plan import BASELINE, COMBINED
from moetune.domain.schedule import BASELINE_STARTS, block_of

if TYPE_CHECKING:
    from moetune.applications.experiments.interrupts import Interrupts
    from moetune.domain.experiment_plan import Intervention, Plan

_ATTEMPTS = 2  # of a baseline that fails, and of filling caches


class BaselineError(MoetuneError):
    """The known-good server does not run: nothing can be compared with it."""


class Experiment:
    """Runs a plan to its end, or on from where its record stops.

    Args:
        plan: the experiment.
        record: open, and held.
        state: the state directory, where what stays in place is recorded.
        configs: puts config files in place here.
        far: puts them on another host.
        tools: what starts, loads and reads a server.
        interrupts: whether an end was asked for.
        show: told where the experiment is.
        refusals: what is refused for a release of the server; empty: for the one that the plan says.
        needs_preparing: whether the caches of an arm are empty.
    """

    def __init__(
        self,
        plan: Plan,
        record: Record,
        state: Path,
        configs: ConfigArms,
        far: FarConfigs,
        tools: Tools,
        interrupts: Interrupts,
        show: Callable[[Progress], None],
        refusals: Callable[[str], Sequence[tuple[str, str]]],
        needs_preparing: Callable[[Sequence[Intervention]], bool],
    ) -> None:
        self._plan, self._record, self._state, self._configs = plan, record, state, configs
        self._far, self._interrupts, self._show = far, interrupts, show
        self._judge = Judge(plan, record.facts)
        self._refusals, self._needs_preparing = refusals, needs_preparing
        self._start: ScheduledStart | None = None
        self._known: tuple[Judgement, ...] = ()
        self._one = OneStart(
            plan, record.folder, configs, tools, proof_texts(plan), interrupts.cancelled, self._say
        )

    def run(self) -> None:
        """Do what is left to do; the record says the rest.

        Raises:
            BaselineError: when the known-good server does not run.
            KeyboardInterrupt: when an end was asked for.
            MoetuneError: when it cannot go on.
        """
        facts = self._record.facts
        if facts.done or facts.taken_back:
            return
        known = self._known_good()
        if facts.keeping is None:
            self._check_known()
            self._prepare_all()
            self._alone()
            self._together()
            self._record.add("keeping", interventions=self._helpers())
        kept = [self._plan.intervention(name) for name in facts.keeping or ()]
        installs = self._configs.keep(kept, self._looked_for(), self._state, known.installs)
        self._record.add("kept", installs=installs)
        self._far.remove()
        self._record.add("done")

    # what is known

    def judgements(self, before: int | None = None) -> tuple[Judgement, ...]:
        """What is known of each arm, in the order of the plan; the last arm last."""
        return self._judge.all(before)

    def _known_good(self) -> KnownGood:
        facts = self._record.facts
        if facts.known_good is None:
            self._record.add("known good", state=to_json(self._configs.known_good(self._state)))
        return from_json(KnownGood, facts.known_good, "the record")

    def _check_known(self) -> None:
        changed = self._known_good().changed()
        if changed:
            raise InputError(
                f"the config files of the server are not as before the experiment: {'; '.join(changed[:3])}",
                "put them back as they were, or begin another experiment: with another seed in the plan",
            )

    def _size(self) -> Size:
        facts = self._record.facts
        if facts.size is None:
            self._record.add("size", size=to_json(self._size_now()))
        return from_json(Size, facts.size, "the record")

    def _size_now(self) -> Size:
        arms = self._tried()
        filled = any(one.preparing for one in self._record.facts.starts)
        caches = filled or any(self._needs_preparing(self._interventions(arm)) for arm in arms)
        return size_of(self._plan, len(arms), preparing_starts(len(arms), caches=caches))

    def _tried(self) -> tuple[Arm, ...]:
        refused = self._record.facts.refused
        return tuple(
            Arm(one.name, (one.name,)) for one in self._plan.interventions if one.name not in refused
        )

    def _looked_for(self) -> tuple[str, ...]:
        """Names of the config files that the baseline's lookups asked for."""
        seen = [one.result for one in self._record.facts.starts if one.result.start.arm == BASELINE]
        names = [config.file for one in seen if one.facts is not None for config in one.facts.configs]
        return tuple(dict.fromkeys(names))

    # the parts

    def _prepare_all(self) -> None:
        """The baseline first: it shows which release it is, and with that what cannot be tried."""
        self._refuse("")
        if not self._tried():
            return
        if self._record.facts.size is None:
            self._size_now()  # a budget that reaches for nothing is seen before the first start
        self._prepare(Arm(BASELINE), 0)
        seen = [one.result.facts for one in self._record.facts.starts if one.result.start.arm == BASELINE]
        versions = [one.version for one in seen if one is not None and one.version]
        if versions and not self._plan.server.version:
            self._refuse(versions[0])
        for arm in self._tried():
            self._prepare(arm, 0)

    def _refuse(self, version: str) -> None:
        facts = self._record.facts
        if facts.size is None:
            for name, reason in self._refusals(version):
                if name not in facts.refused:
                    self._record.add("refused", intervention=name, reason=reason)

    def _alone(self) -> None:
        """Each intervention against the baseline."""
        for block in range(self._size().planned):
            if self._record.facts.combined is not None:
                return
            decided = {one.arm for one in self.judgements(block) if one.decided}
            arms = tuple(arm for arm in self._tried() if arm.name not in decided)
            if not arms or not self._block(arms, block):
                return

    def _together(self) -> None:
        """All that helped against the baseline: separate winners may not win together."""
        facts = self._record.facts
        if facts.combined is None:
            alone = self._judge.alone(ends=True)
            helping = [one for one in alone if one.verdict is Verdict.HELPS]
            names, left = compatible(
                self._plan.server, [(self._plan.intervention(one.arm), _gain(one)) for one in helping]
            )
            first = 1 + max((one.result.start.block for one in facts.starts), default=-1)
            sharing = max(1, arms_of_last(len(self._tried()), len(helping)))
            planned = min(self._size().planned, proposed_blocks(self._plan.decision, sharing))
            self._record.add(
                "combined",
                interventions=names,
                first_block=first,
                planned=planned,
                sharing=sharing,
                left_out=left,
            )
        assert facts.combined is not None
        if len(facts.combined) < 2:
            return
        last = Arm(COMBINED, facts.combined)
        self._prepare(last, facts.first_combined)
        for block in range(facts.first_combined, facts.first_combined + facts.planned_combined):
            if any(one.decided and one.arm == COMBINED for one in self.judgements(block)):
                return
            if not self._block((last,), block):
                return

    def _helpers(self) -> tuple[str, ...]:
        """Interventions that stay: those of the last arm, when it helps; of one alone, its own arm is it."""
        facts = self._record.facts
        if not facts.combined or len(facts.combined) < 2:
            return facts.combined or ()
        last = self._judge.last(ends=True)
        return facts.combined if last.verdict is Verdict.HELPS else ()

    def _block(self, arms: tuple[Arm, ...], block: int) -> bool:
        """Run what is missing of a block; False when the budget has no time for it."""
        scheduled = block_of([arm.name for arm in arms], block, self._plan.seed)
        by_name = {arm.name: arm for arm in (Arm(BASELINE), *arms)}
        if not any(self._attempts(start) for start in scheduled) and not self._has_time(
            len(scheduled), block
        ):
            return False
        for start in scheduled:
            self._run(start, by_name[start.arm])
        return True

    def _has_time(self, starts: int, block: int) -> bool:
        limit_s = self._plan.budget.minutes * 60
        facts = self._record.facts
        duration = duration_of(self._plan, facts.starts)
        if not limit_s or not duration.measured:
            return True
        # Time for the last arm is kept back: as many blocks as there were.
        last = (1 + BASELINE_STARTS) * (block + 1) if facts.combined is None and len(self._tried()) > 1 else 0
        used = sum(one.result.took_s for one in facts.starts)
        return used + (starts + last) * duration.start_s <= limit_s

    # a start

    def _attempts(self, start: ScheduledStart) -> list[Finished]:
        starts = self._record.facts.starts
        return [one for one in starts if one.result.start == start and not one.preparing]

    def _needs_start(self, start: ScheduledStart, arm: Arm) -> bool:
        attempts = self._attempts(start)
        if arm.name != BASELINE:
            return not attempts and not starts_of(arm, self._record.facts).has_failed
        return not any(one.result.ending is Ending.DONE for one in attempts)

    def _prepare(self, arm: Arm, block: int) -> None:
        """Starts that count for nothing where the caches of an arm are empty."""
        start = ScheduledStart(block, 0, arm.name)
        while self._needs_preparing(self._interventions(arm)) and not self._is_hopeless(arm):
            attempts = [
                one for one in self._record.facts.starts if one.preparing and one.result.start == start
            ]
            if len(attempts) >= _ATTEMPTS:
                if arm.name == BASELINE:
                    self._give_up(attempts[-1])
                return
            self._do(start, arm, len(attempts) + 1, preparing=True)

    def _is_hopeless(self, arm: Arm) -> bool:
        return arm.name != BASELINE and any(one.decided and one.arm == arm.name for one in self.judgements())

    def _run(self, start: ScheduledStart, arm: Arm) -> None:
        while self._needs_start(start, arm):
            attempts = self._attempts(start)
            if len(attempts) >= _ATTEMPTS:
                self._give_up(attempts[-1])
            self._do(start, arm, len(attempts) + 1)

    def _give_up(self, failed: Finished) -> None:
        reason = f"{failed.result.ending.value}: {failed.result.reason}"
        self._record.add("stopped", reason=reason)
        raise BaselineError(
            f"the known-good server failed twice in a row, {reason}",
            f"its log: {self._record.folder / failed.result.log}; mend [server] of the plan",
        )

    def _do(self, start: ScheduledStart, arm: Arm, attempt: int, *, preparing: bool = False) -> None:
        self._interrupts.check()
        self._start = start
        number = self._record.facts.begun_starts + 1
        self._record.add("begun", start=to_json(start))
        interventions = self._interventions(arm)
        placed = self._far.paths(interventions)
        order = StartOrder(start, interventions, number, attempt, preparing, placed)
        self._say("a start that only fills the caches" if preparing else "begins", begins=True)
        finished = self._one.run(order, self._looked_for())
        self._record.add_start(finished)
        self._known = self.judgements()
        self._say(_summary(self._plan, finished), begins=True)
        self._start = None
        self._check_known()

    def _interventions(self, arm: Arm) -> tuple[Intervention, ...]:
        """As they run: on another host with the variable that names their config files."""
        return self._far.placed([self._plan.intervention(name) for name in arm.interventions])

    def _say(self, text: str, *, begins: bool = False) -> None:
        facts = self._record.facts
        left = self._most_left()
        duration = duration_of(self._plan, facts.starts)
        self._show(
            Progress(
                said=text,
                start=self._start,
                begins=begins,
                finished=len(facts.starts),
                most_left=left,
                seconds_left=left * duration.start_s if duration.measured else None,
                known=self._known,
            )
        )

    def _most_left(self) -> int:
        """Starts that there may still be, when nothing more is decided early."""
        facts = self._record.facts
        if facts.size is None:
            return 0
        planned = facts.size["planned"]
        block, here = (0, 0) if self._start is None else (self._start.block, self._start.position)
        of_last = 1 + BASELINE_STARTS
        if facts.combined is not None:
            blocks = facts.first_combined + facts.planned_combined - block if len(facts.combined) > 1 else 0
            return max(0, of_last * blocks - here)
        open_arms = sum(not one.decided for one in self._known) if self._known else len(self._tried())
        last = of_last * planned if len(self._tried()) > 1 else 0
        return max(0, (planned - block) * (open_arms + BASELINE_STARTS) - here + last)


def _gain(one: Judgement) -> float:
    """How much better an arm is: above 1 whichever way its metric is good."""
    if not one.comparisons:
        return 1.0
    first = one.comparisons[0]
    return first.ratio if HIGHER_IS_BETTER[first.metric] else 1 / first.ratio


def _summary(plan: Plan, finished: Finished) -> str:
    result = finished.result
    if result.ending is not Ending.DONE:
        return f"{result.ending.value}: {result.reason}"
    if not result.passes:
        return f"caches filled in {spoken(result.took_s)}"
    values = [getattr(one, plan.decision.metric) for one in result.passes]
    known = [value for value in values if value is not None]
    shown = f"{median(known):.4g} {plan.decision.metric}" if known else f"no {plan.decision.metric}"
    return f"ready after {spoken(result.ready_s)}, {shown}"


__all__ = ["BaselineError", "Experiment"]
