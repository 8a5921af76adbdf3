"""What waits to be measured: in random order, one kernel and m on one GPU, and never a culprit again."""

from __future__ import annotations

import random
from collections import Counter

from moetune.applications.backlog import Backlog
from moetune.applications.binaries import Binaries
from moetune.applications.targets import Target
from moetune.domain.compilation import CompileTask
from moetune.domain.config import KernelConfig
from tests.applications.fake_machine import PROBLEM, SERVER

CONFIGS = [KernelConfig(m, n, 64, 1, 4, 3) for m in (16, 32, 64) for n in (32, 64, 128)]
TARGETS = [Target("up", m, config) for config in CONFIGS for m in (1, 64, 1024)]


def task_of(target: Target) -> CompileTask:
    task = Binaries(SERVER, PROBLEM).task_of(target)
    assert isinstance(task, CompileTask)
    return task


def drawn(backlog: Backlog, device: int = 0) -> list[Target]:
    found = []
    while (target := backlog.draw(device)) is not None:
        found.append(target)
    return found


def test_all_are_drawn_once_in_an_order_that_the_seed_decides() -> None:
    orders = []
    for seed in (0, 0, 1):
        backlog = Backlog(random.Random(seed))
        backlog.add_ready(TARGETS)
        orders.append(drawn(backlog))
    assert Counter(orders[0]) == Counter(TARGETS)
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != TARGETS


def test_candidates_of_one_kernel_and_m_go_to_one_gpu_until_it_is_gone() -> None:
    backlog = Backlog(random.Random(0))
    backlog.add_ready(TARGETS)
    first = backlog.draw(0)
    assert first is not None
    others = drawn(backlog, 1)
    assert {target.m for target in others} == {1, 64, 1024} - {first.m}
    backlog.put_back(first)
    assert backlog.draw(1) is None
    backlog.lose_device(0)
    assert Counter(drawn(backlog, 1)) == Counter(target for target in TARGETS if target.m == first.m)


def test_a_target_is_drawn_only_after_its_binary_is_there() -> None:
    backlog = Backlog(random.Random(0))
    target = TARGETS[0]
    backlog.add_compiling(target, task_of(target))
    assert backlog
    assert target in backlog
    assert backlog.draw(0) is None
    assert backlog.take_compiling(task_of(target)) == {target}
    backlog.put_back(target)
    assert backlog.draw(0) == target
    assert backlog, "it has no answer yet"
    backlog.finish(target)
    assert not backlog
    assert (backlog.answered, backlog.wanted) == (1, 1)


def test_a_culprit_is_dropped_wherever_it_waits_and_nothing_else() -> None:
    culprit = CONFIGS[0]
    ready = [target for target in TARGETS if target.m == 1]
    compiling = [target for target in TARGETS if target.m == 64]
    backlog = Backlog(random.Random(0))
    backlog.add_ready(ready)
    for target in compiling:
        backlog.add_compiling(target, task_of(target))
    lost = backlog.drop("up", culprit)
    assert sorted(lost) == [Target("up", 1, culprit), Target("up", 64, culprit)]
    assert not backlog.take_compiling(task_of(Target("up", 64, culprit)))
    assert Counter(drawn(backlog)) == Counter(target for target in ready if target.config != culprit)
    assert backlog.take_compiling(task_of(compiling[-1]))
    # The same config of the other kernel is another candidate.
    down = Target("down", 1, culprit)
    backlog.add_ready([down])
    assert backlog.drop("up", culprit) == []
    assert backlog.draw(0) == down


def test_a_binary_that_no_target_needs_is_waited_for_all_the_same() -> None:
    backlog = Backlog(random.Random(0))
    backlog.await_binary(task_of(TARGETS[0]))
    assert backlog
    assert backlog.take_compiling(task_of(TARGETS[0])) == set()
    assert not backlog


def test_what_is_given_up_is_named_and_not_drawn() -> None:
    backlog = Backlog(random.Random(0))
    backlog.add_ready(TARGETS[:3])
    backlog.add_compiling(TARGETS[3], task_of(TARGETS[3]))
    assert backlog.clear() == set(TARGETS[:4])
    assert not backlog
    assert backlog.draw(0) is None
