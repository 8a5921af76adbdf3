"""The loop: what runs in which order, what is decided, what a crash at any point costs."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moetune.applications.experiments.arm_errors import CannotStartError, ForeignProcessError
from moetune.applications.experiments.interrupts import Interrupts
from moetune.applications.experiments.load_errors import LoadError
from moetune.applications.experiments.record import look, recorded
from moetune.applications.experiments.running import BaselineError
from moetune.applications.experiments.size import size_of
from moetune.applications.journal import Journal
from moetune.domain.errors import InputError, OutputError
from moetune.domain.experiment import Ending, Verdict
from moetune.domain.experiment_plan import BASELINE, COMBINED, Budget, Intervention
from moetune.domain.schedule import BASELINE_STARTS, block_of
from tests.applications.experiments.made_up import MadeUp, effect, made_plan
from tests.applications.install_world import FOLDER, pair, write

if TYPE_CHECKING:
    from pathlib import Path

    from moetune.applications.experiments.report import Report

FASTER, SLOWER, SAME = (
    effect("faster", "--times", "1.2"),
    effect("slower", "--times", "0.8"),
    effect("same", "--x"),
)
ALSO = effect("also", "--again", "1.1")


def verdicts(report: Report) -> dict[str, Verdict]:
    return {one.arm: one.verdict for one in report.judgements}


def starts(report: Report) -> list[tuple[int, int, str, int, bool]]:
    return [
        (one.result.start.block, one.result.start.position, one.result.start.arm, one.attempt, one.preparing)
        for one in report.starts
    ]


def test_each_arm_alone_then_all_that_helped(tmp_path: Path) -> None:
    machine = MadeUp()
    report = machine.run(made_plan(FASTER, SLOWER, SAME, ALSO), tmp_path)
    assert verdicts(report) == {
        "faster": Verdict.HELPS,
        "slower": Verdict.HURTS,
        "same": Verdict.EQUIVALENT,
        "also": Verdict.HELPS,
        COMBINED: Verdict.HELPS,
    }
    assert report.kept == ("faster", "also")
    assert report.done
    assert report.helps
    last = next(one for one in report.judgements if one.arm == COMBINED)
    assert last.comparisons[0].ratio == pytest.approx(1.32, rel=0.01)
    assert machine.running == 0


def test_the_order_is_the_schedule_of_the_seed(tmp_path: Path) -> None:
    plan = made_plan(FASTER, SLOWER)
    report = MadeUp().run(plan, tmp_path)
    arms = ["faster", "slower"]
    first = [start for block in range(3) for start in block_of(arms, block, plan.seed)]
    assert [one.result.start for one in report.starts][: len(first)] == first
    other = MadeUp().run(replace(plan, seed=5), tmp_path)
    assert [one.result.start for one in other.starts][: len(first)] != first


def test_one_that_helps_alone_needs_no_last_arm(tmp_path: Path) -> None:
    report = MadeUp().run(made_plan(FASTER, SLOWER), tmp_path)
    assert COMBINED not in verdicts(report)
    assert report.kept == ("faster",)


def test_nothing_helps(tmp_path: Path) -> None:
    report = MadeUp().run(made_plan(SLOWER, SAME), tmp_path)
    assert report.kept == ()
    assert report.done
    assert not report.helps


def test_separate_winners_that_do_not_win_together_are_not_kept(tmp_path: Path) -> None:
    one, two = effect("one", "--times", "1.1"), effect("two", "--also", "1.1")

    class Together(MadeUp):
        def _load(self, *arguments: Any) -> Any:
            result = super()._load(*arguments)
            both = "--times" in self._now and "--also" in self._now
            rate = result.output_tokens_per_s * (0.8 if both else 1.1 if "--also" in self._now else 1.0)
            return replace(result, output_tokens_per_s=rate)

    report = Together().run(made_plan(one, two), tmp_path)
    assert verdicts(report) == {"one": Verdict.HELPS, "two": Verdict.HELPS, COMBINED: Verdict.HURTS}
    assert report.kept == ()


def test_winners_that_set_the_same_flag_are_not_put_together(tmp_path: Path) -> None:
    little, much = effect("little", "--times", "1.1"), effect("much", "--times", "1.2")
    report = MadeUp().run(made_plan(little, much), tmp_path)
    assert report.kept == ("much",)
    (said,) = report.left_out
    assert said.startswith("little is not in the last arm")
    assert "--times" in said


def test_an_arm_that_is_decided_is_not_started_any_more(tmp_path: Path) -> None:
    silent = effect("silent", "--silent")
    machine = MadeUp(faults={"--silent": "silent"})
    report = machine.run(made_plan(silent, FASTER), tmp_path)
    assert verdicts(report)["silent"] is Verdict.INVALID
    assert machine.begun.count("--silent") == 1


@pytest.mark.parametrize(
    ("fault", "verdict", "tries", "said"),
    [
        ("no start", Verdict.FAILED, 2, "it ends at once"),
        ("never", Verdict.FAILED, 2, "not ready in time"),
        ("no load", Verdict.FAILED, 2, "3 of 10 requests"),
        ("dies", Verdict.FAILED, 1, "SIGSEGV"),
        ("stays", Verdict.FAILED, 2, "process 7 is left"),
        ("fewer requests", Verdict.INVALID, 1, "max_running_requests is 26"),
    ],
)
def test_an_arm_that_fails_is_told_and_the_others_go_on(
    fault: str, verdict: Verdict, tries: int, said: str, tmp_path: Path
) -> None:
    bad = effect("bad", "--bad")
    machine = MadeUp(faults={"--bad": fault})
    report = machine.run(made_plan(bad, FASTER), tmp_path)
    assert verdicts(report) == {"bad": verdict, "faster": Verdict.HELPS}
    assert machine.begun.count("--bad") == tries
    judged = report.judgements[0]
    assert any(said in text for text in (*judged.notes, *judged.validity.problems))
    assert report.kept == ("faster",)
    assert machine.running == 0


def test_a_baseline_that_fails_once_is_started_again(tmp_path: Path) -> None:
    class Once(MadeUp):
        def _start(self, *arguments: Any) -> Any:
            if not arguments[1] and "failed" not in self.begun:
                self.begun.append("failed")
                raise CannotStartError("a port was taken")
            return super()._start(*arguments)

    report = Once().run(made_plan(FASTER), tmp_path)
    tried = [one for one in starts(report) if one[3] == 2]
    assert [one[2] for one in tried] == [BASELINE]
    assert verdicts(report) == {"faster": Verdict.HELPS}


def test_a_baseline_that_fails_twice_in_a_row_ends_the_experiment(tmp_path: Path) -> None:
    class Down(MadeUp):
        def _fault(self, words: Any) -> str:
            return "" if words else "never"

    machine = Down()
    plan = made_plan(FASTER)
    with pytest.raises(BaselineError, match="known-good server failed twice in a row, cannot start"):
        machine.run(plan, tmp_path)
    assert machine.begun.count("baseline") == 2
    (name,) = recorded(tmp_path)
    assert "not ready in time" in look(tmp_path, name).facts.stopped
    assert machine.running == 0
    # The server was mended: the same command tries it again, and says no more that it stopped.
    with pytest.raises(BaselineError):
        machine.run(plan, tmp_path)


def test_somebody_else_on_the_gpus_is_no_arms_fault(tmp_path: Path) -> None:
    class Shared(MadeUp):
        def _start(self, *arguments: Any) -> Any:
            if len(self.begun) == 4:
                raise ForeignProcessError("process 99 computes on GPU 0")
            return super()._start(*arguments)

    machine = Shared()
    plan = made_plan(FASTER, SLOWER)
    with pytest.raises(ForeignProcessError):
        machine.run(plan, tmp_path)
    (name,) = recorded(tmp_path)
    assert len(look(tmp_path, name).facts.starts) == 4
    report = MadeUp().run(plan, tmp_path)
    assert verdicts(report) == {"faster": Verdict.HELPS, "slower": Verdict.HURTS}


def test_case_46_an_empty_cache_is_filled_before_anything_is_measured(tmp_path: Path) -> None:
    machine = MadeUp(fill_caches=True)
    report = machine.run(made_plan(FASTER, ALSO), tmp_path)
    preparing = [arm for _, _, arm, _, is_preparing in starts(report) if is_preparing]
    assert preparing == [BASELINE, "faster", "also", COMBINED]
    assert [one[4] for one in starts(report)][:4] == [True, True, True, False]
    assert all(not one.result.passes for one in report.starts if one.preparing)


def test_a_budget_of_starts_is_kept(tmp_path: Path) -> None:
    for budget in range(11, 34, 2):
        machine = MadeUp(fill_caches=True)
        plan = made_plan(FASTER, ALSO, budget=Budget(starts=budget))
        report = machine.run(plan, tmp_path / str(budget))
        assert len(machine.begun) <= budget
        # The last arm has its part of it.
        assert (COMBINED in verdicts(report)) is (budget >= 4 + 4 * 7)


def test_a_budget_that_reaches_for_nothing_is_an_error_before_any_start(tmp_path: Path) -> None:
    machine = MadeUp()
    with pytest.raises(InputError, match="does not reach") as caught:
        machine.run(made_plan(FASTER, SAME, budget=Budget(starts=3)), tmp_path)
    assert "raise budget.starts" in (caught.value.hint or "")
    assert machine.begun == []


def test_a_budget_of_minutes_ends_the_experiment_at_a_block(tmp_path: Path) -> None:
    plan = made_plan(FASTER, SAME, budget=Budget(minutes=30))
    machine = MadeUp(seconds=120, fill_caches=True)
    report = machine.run(plan, tmp_path)
    assert report.done
    assert machine.now <= 30 * 60
    blocks = {one[0] for one in starts(report) if not one[4]}
    assert 0 < len(blocks) < report.planned


def test_what_the_budget_cut_off_is_not_called_a_win(tmp_path: Path) -> None:
    report = MadeUp(noise=0.1).run(made_plan(SAME, budget=Budget(starts=4)), tmp_path)
    assert verdicts(report)["same"] is Verdict.INCONCLUSIVE


def test_a_refused_intervention_is_never_started(tmp_path: Path) -> None:
    machine = MadeUp(refused=(("same", "not on this GPU"),))
    report = machine.run(made_plan(FASTER, SAME), tmp_path)
    assert verdicts(report)["same"] is Verdict.CANNOT_ACTIVATE
    assert "--x" not in machine.begun
    assert report.judgements[1].validity.problems == ("not on this GPU",)


def test_all_are_refused_and_nothing_is_started(tmp_path: Path) -> None:
    machine = MadeUp(refused=(("same", "no"), ("faster", "no")))
    report = machine.run(made_plan(FASTER, SAME), tmp_path)
    assert machine.begun == []
    assert report.done
    assert not report.helps


def test_a_clock_that_jumps_changes_no_duration(tmp_path: Path) -> None:
    class Jumps(MadeUp):
        def _load(self, *arguments: Any) -> Any:
            self.wall += -1e7 if len(self.begun) % 2 else 3e7
            return super()._load(*arguments)

    report = Jumps().run(made_plan(FASTER), tmp_path)
    assert {one.result.took_s for one in report.starts} == {75.0}
    assert all(one.result.ready_s == 15.0 for one in report.starts)


def test_an_end_that_was_asked_for_stops_the_server_and_loses_no_finished_start(tmp_path: Path) -> None:
    plan = made_plan(FASTER, SLOWER)
    whole = MadeUp().run(plan, tmp_path / "whole")
    for after in (1, 4, 7, 12):
        state = tmp_path / str(after)
        interrupts = Interrupts()
        machine = MadeUp()
        loads = 0

        def count(interrupts: Interrupts = interrupts, after: int = after) -> None:
            nonlocal loads
            loads += 1
            if loads == after:
                interrupts._asked = True

        machine.on_load = count
        with pytest.raises(KeyboardInterrupt):
            machine.run(plan, state, interrupts)
        assert machine.running == 0
        (name,) = recorded(state)
        before = len(look(state, name).facts.starts)
        assert before == (after - 1) // 2
        report = MadeUp().run(plan, state)
        assert starts(report) == starts(whole)
        assert verdicts(report) == verdicts(whole)


def test_on_another_host_config_files_are_named_by_a_variable(tmp_path: Path) -> None:
    tuned = Intervention("tuned", configs=(str(write(tmp_path / "tuned", pair(64))),), proof="runs")
    none = Intervention("none", without_configs=True, proof="runs")
    server: dict[str, Any] = {"name": "sglang", "version": "0.5.23", "host": "gpu-box"}
    server["triton_version"] = "3.6.0"
    machine = MadeUp()
    puts: list[tuple[str, ...]] = []

    class Far(MadeUp):
        def _put_far(self, host: str, files: Any) -> str:
            puts.append(tuple(files))
            return super()._put_far(host, files)

    machine = Far()
    report = machine.run(made_plan(tuned, none, **server), tmp_path / "state")
    # Each is put there once, however often it is started, and gone at the end.
    assert sorted(puts) == [(), tuple(sorted(pair(64, FOLDER)))]
    assert machine.far == {}
    names = {value for variables in machine.variables for value in variables.values()}
    assert names == {"/far/0", "/far/1"}
    assert {one for variables in machine.variables for one in variables} == {"SGLANG_MOE_CONFIG_DIR"}
    assert {} in machine.variables  # the baseline
    placed = {one.installed for one in report.starts if one.result.start.arm == "tuned"}
    assert [sorted(path.partition("/configs/")[2] for path in paths) for paths in placed] == [
        sorted(path.partition("configs/")[2] for path in pair(64, FOLDER))
    ]


def test_a_full_disk_is_no_arms_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.disk_usage
    free = 1 << 40

    class Filling(MadeUp):
        def _load(self, *arguments: Any) -> Any:
            nonlocal free
            if len(self.begun) == 5:
                free = 1 << 20
                raise LoadError("its result could not be written")
            return super()._load(*arguments)

    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=free))
    plan = made_plan(FASTER, SLOWER)
    with pytest.raises(OutputError, match="1 MiB left"):
        Filling().run(plan, tmp_path)
    with pytest.raises(OutputError, match="1 MiB left"):
        MadeUp().run(plan, tmp_path)
    free = 1 << 40
    report = MadeUp().run(plan, tmp_path)
    assert verdicts(report) == {"faster": Verdict.HELPS, "slower": Verdict.HURTS}
    assert all(one.result.ending is Ending.DONE for one in report.starts)


def test_a_view_that_fails_leaves_no_server_running(tmp_path: Path) -> None:
    class Broken(MadeUp):
        def _show(self, record: Any) -> Any:
            del record

            def show(progress: Any) -> None:
                if progress.said == "stopping it":
                    raise OSError(5, "the terminal is gone")

            return show

    machine = Broken()
    with pytest.raises(OSError, match="terminal is gone"):
        machine.run(made_plan(FASTER), tmp_path)
    assert machine.running == 0


class Killed(BaseException):
    """moetune is gone."""


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kills=st.lists(st.tuples(st.integers(0, 60), st.booleans()), min_size=1, max_size=5))
def test_killed_before_or_after_any_line_it_goes_on_as_if_it_had_not_been(
    kills: list[tuple[int, bool]], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = made_plan(FASTER, SLOWER, ALSO, effect("bad", "--bad"))
    folder = tmp_path_factory.mktemp("kills")

    def machine() -> MadeUp:
        return MadeUp(faults={"--bad": "no load"})

    whole = machine().run(plan, folder / "whole")
    append = Journal.append
    for number, before in kills:
        left = number

        def killing(self: Journal, kind: str, *, durable: bool = True, **values: Any) -> None:
            nonlocal left
            left -= 1
            if left < 0 and before:  # noqa: B023 - used up before the next one
                raise Killed
            append(self, kind, durable=durable, **values)
            if left < 0:
                raise Killed

        monkeypatch.setattr(Journal, "append", killing)
        try:
            machine().run(plan, folder / "state")
        except Killed:
            pass
        finally:
            monkeypatch.setattr(Journal, "append", append)
    report = machine().run(plan, folder / "state")
    assert starts(report) == starts(whole)
    assert [(one.arm, one.verdict, one.comparisons) for one in report.judgements] == [
        (one.arm, one.verdict, one.comparisons) for one in whole.judgements
    ]
    assert report.kept == whole.kept


def test_a_finished_experiment_is_not_run_again(tmp_path: Path) -> None:
    plan = made_plan(FASTER)
    first = MadeUp().run(plan, tmp_path)
    machine = MadeUp()
    again = machine.run(plan, tmp_path)
    assert machine.begun == []
    assert again.to_json() == first.to_json()


def test_the_live_view_counts_down(tmp_path: Path) -> None:
    machine = MadeUp()
    machine.run(made_plan(FASTER, SLOWER), tmp_path)
    lefts = [one.most_left for one in machine.said if one.begins]
    assert lefts[0] > lefts[-1] >= 0
    assert lefts == sorted(lefts, reverse=True)
    times = [one.seconds_left for one in machine.said if one.seconds_left is not None]
    assert times[0] == pytest.approx(75.0 * lefts[1], rel=0.5)


@given(arms=st.integers(1, 12), starts=st.integers(1, 500), preparing=st.integers(0, 13))
def test_the_size_of_an_experiment_fits_its_budget(arms: int, starts: int, preparing: int) -> None:
    plan = made_plan(FASTER, budget=Budget(starts=starts))
    try:
        size = size_of(plan, arms, preparing)
    except InputError:
        assert starts < arms + BASELINE_STARTS + 1 + BASELINE_STARTS + 1 + preparing
        return
    assert 0 < size.planned <= size.proposed
    assert size.most_starts + preparing <= starts


def test_an_intervention_of_another_name_is_looked_up() -> None:
    plan = made_plan(FASTER)
    assert plan.intervention("faster") == FASTER
    with pytest.raises(KeyError):
        plan.intervention("?")
    assert Intervention("x").line == 0
