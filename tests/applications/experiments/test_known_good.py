"""The state before an experiment: seen, changed for an arm, and back byte for byte."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetune.applications.atomic import Places
from moetune.applications.experiments.interrupts import Interrupts
from moetune.applications.experiments.known_good import (
    ConfigArms,
    KnownGood,
    files_there,
    take_back,
    touches_files,
)
from moetune.applications.install_plan import InstallRequest, prepare_install
from moetune.applications.installing import install
from moetune.applications.manifest import open_ledger
from moetune.domain.codec import from_json, to_json
from moetune.domain.errors import InputError, MoetuneError, OutputError
from moetune.domain.experiment_plan import Intervention, LoadPlan, Plan, ServerPlan
from tests.applications.install_world import DOWN, FOLDER, UP, pair, snapshot, write

LOOKED_FOR = (UP, DOWN)


class World:
    def __init__(self, folder: Path, **server: Any) -> None:
        self.root = write(folder / "root", pair(32, FOLDER))
        self.tuned = write(folder / "tuned", pair(64))
        self.state, self.run = folder / "state", folder / "state" / "experiments" / "e0"
        self.run.mkdir(parents=True, mode=0o700)
        self.state.chmod(0o700)
        known = ServerPlan("sglang", ("serve",), version="0.5.23", triton_version="3.6.0")
        known = replace(known, **{"config_root": str(self.root), **server})
        self.put = Intervention("tuned", configs=(str(self.tuned),))
        self.none = Intervention("none", without_configs=True)
        self.flag = Intervention("flag", ("--x",))
        plan = Plan("made up", known, LoadPlan("guidellm"), (self.put, self.none, self.flag))
        self.plan = plan
        self.configs = ConfigArms(plan, self.run, {})


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_the_state_before_is_written_down(world: World) -> None:
    prepared = prepare_install(
        InstallRequest(paths=(world.tuned,), server="sglang", server_version="0.5.23", root=world.root), {}
    )
    installed = install(replace(prepared, request=replace(prepared.request, state=world.state)), {})
    known = world.configs.known_good(world.state)
    assert known.root == str(world.root)
    assert known.installs == (installed.id,)
    assert {one.path for one in known.files} >= {f"{FOLDER}/{UP}", f"{FOLDER}/{DOWN}"}
    assert from_json(KnownGood, to_json(known), "test") == known
    assert known.changed() == ()


def test_files_of_an_arm_come_and_go(world: World) -> None:
    before, known = snapshot(world.root), world.configs.known_good(world.state)
    paths = world.configs.put((world.put,), LOOKED_FOR)
    assert paths == (f"{world.root}/{FOLDER}/{UP}", f"{world.root}/{FOLDER}/{DOWN}")
    for path in paths:
        assert Path(path).read_bytes() == (world.tuned / Path(path).name).read_bytes()
    assert len(known.changed()) == 2
    assert world.configs.take_back()
    assert snapshot(world.root) == before
    assert known.changed() == ()
    assert not world.configs.take_back()


def test_files_that_were_not_there_go_with_their_directories(tmp_path: Path) -> None:
    world = World(tmp_path, config_root=str(tmp_path / "new"))
    known = world.configs.known_good(world.state)
    world.configs.put((world.put,), ())
    assert known.changed()[0].endswith(f"{UP} is new")
    world.configs.take_back()
    assert not (tmp_path / "new").exists()
    assert known.changed() == ()


def test_tables_are_taken_away_of_every_triton_version(world: World) -> None:
    write(
        world.root,
        {**pair(16, "configs/triton_3_5_1"), "configs/triton_3_6_0/E=8,N=8,device_name=x.json": "{}"},
    )
    before = snapshot(world.root)
    world.configs.put((world.none,), (UP,))
    left = [path for path, kept in snapshot(world.root).items() if kept is not None]
    assert left == ["configs/triton_3_6_0/E=8,N=8,device_name=x.json"]
    world.configs.take_back()
    assert snapshot(world.root) == before


def test_taking_away_what_nobody_looks_for_is_an_error(world: World) -> None:
    before = snapshot(world.root)
    with pytest.raises(InputError, match="the baseline's log names none"):
        world.configs.put((world.none,), ())
    with pytest.raises(InputError, match="nothing to take away"):
        world.configs.put((world.none,), ("E=1,N=1,device_name=other.json",))
    assert not world.configs.take_back()
    assert snapshot(world.root) == before


def test_two_arms_over_each_other_come_back_too(world: World) -> None:
    before = snapshot(world.root)
    world.configs.put((world.put,), LOOKED_FOR)
    world.configs.put((world.none,), LOOKED_FOR)
    world.configs.take_back()
    assert snapshot(world.root) == before


class CrashError(BaseException):
    """moetune is gone."""


class Doomed:
    """Lets so many calls of one method through; then nothing works any more, as after a kill."""

    def __init__(self, name: str, calls: int) -> None:
        self.name, self.calls = name, calls

    def wrap(self, name: str) -> Any:
        real = getattr(Places, name)

        def calling(places: Places, *arguments: Any) -> Any:
            self.calls -= name == self.name
            if self.calls <= 0:
                raise CrashError
            return real(places, *arguments)

        return calling


@pytest.mark.parametrize("method", ["put", "remove", "mark"])
@pytest.mark.parametrize("intervention", ["put", "none"])
def test_a_crash_anywhere_between_is_mended_by_taking_back(
    intervention: str, method: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(world.root)
    for count in range(1, 40):
        doomed = Doomed(method, count)
        with monkeypatch.context() as patch, contextlib.suppress(CrashError):
            for name in ("put", "remove", "mark"):
                patch.setattr(Places, name, doomed.wrap(name))
            world.configs.put((getattr(world, intervention),), LOOKED_FOR)
        world.configs.take_back()
        assert snapshot(world.root) == before, count
        if doomed.calls > 0:
            assert count > 1
            return
    pytest.fail("it never came to its end")


def test_what_somebody_else_changes_meanwhile_stays_and_is_named(world: World) -> None:
    world.configs.put((world.put,), LOOKED_FOR)
    (world.root / FOLDER / UP).write_text('{"1": {}}')
    with pytest.raises(OutputError, match="changed by somebody else"):
        world.configs.take_back()
    assert (world.root / FOLDER / UP).read_text() == '{"1": {}}'


def test_who_puts_the_bytes_of_before_back_by_hand_is_believed(world: World) -> None:
    before = (world.root / FOLDER / UP).read_bytes()
    world.configs.put((world.put,), LOOKED_FOR)
    (world.root / FOLDER / UP).write_text('{"1": {}}')
    with pytest.raises(OutputError):
        world.configs.take_back()
    (world.root / FOLDER / UP).write_bytes(before)
    assert world.configs.take_back()
    assert not world.configs.take_back()


def test_who_removes_the_new_files_by_hand_is_believed(tmp_path: Path) -> None:
    world = World(tmp_path, config_root=str(tmp_path / "new"))
    world.configs.put((world.put,), ())
    shutil.rmtree(tmp_path / "new")
    assert world.configs.take_back()
    assert not world.configs.take_back()


def test_what_was_changed_can_be_left_for_good(world: World) -> None:
    world.configs.put((world.put,), LOOKED_FOR)
    (world.root / FOLDER / UP).write_text('{"1": {}}')
    assert take_back(world.run, {}, forget=True)
    assert (world.root / FOLDER / UP).read_text() == '{"1": {}}'
    assert not take_back(world.run, {})


def test_what_changed_is_said_in_words(world: World) -> None:
    known = world.configs.known_good(world.state)
    (world.root / FOLDER / UP).write_text("{}")
    (world.root / FOLDER / DOWN).unlink()
    write(world.root, {f"{FOLDER}/E=9,N=9,device_name=x.json": "{}"})
    said = [one.rpartition(".json")[2] for one in known.changed()]
    assert sorted(said) == [" has other bytes", " is gone", " is new"]


def test_a_mode_or_a_time_that_changed_is_seen(world: World) -> None:
    known = world.configs.known_good(world.state)
    (world.root / FOLDER / UP).chmod(0o600)
    assert known.changed() == (f"{world.root}/{FOLDER}/{UP} has another mode or time",)


def test_links_and_large_files_are_no_config_files(tmp_path: Path) -> None:
    root = write(tmp_path / "root", pair(32, FOLDER))
    (root / FOLDER / "link.json").symlink_to(tmp_path / "elsewhere")
    (root / FOLDER / "large.json").write_bytes(b" " * (2 << 20))
    (root / FOLDER / "folder.json").mkdir()
    assert [one.path for one in files_there(root)] == [f"{FOLDER}/{UP}", f"{FOLDER}/{DOWN}"]
    assert files_there(tmp_path / "missing") == ()


def test_what_stays_is_recorded_as_an_install(world: World) -> None:
    before = snapshot(world.root)
    known = world.configs.known_good(world.state)
    (name,) = world.configs.keep((world.put, world.flag), LOOKED_FOR, world.state, known.installs)
    with open_ledger(world.state, writing=False) as ledger:
        assert [one.id for one in ledger.manifest.installs] == [name]
    with open_ledger(world.run, writing=False) as ledger:
        assert ledger.manifest.installs == ()
    # A call before this one had put it there and could not say so.
    assert world.configs.keep((world.put,), LOOKED_FOR, world.state, known.installs) == (name,)
    assert not world.configs.take_back()
    assert snapshot(world.root) != before
    take_back(world.state, {})
    assert snapshot(world.root) == before


def test_a_removal_that_stays_is_recorded_once(world: World) -> None:
    before = snapshot(world.root)
    names = world.configs.keep((world.none,), LOOKED_FOR, world.state, ())
    assert world.configs.keep((world.none,), LOOKED_FOR, world.state, ()) == names
    take_back(world.state, {})
    assert snapshot(world.root) == before


def test_on_another_host_no_file_of_this_machine_is_touched(tmp_path: Path) -> None:
    world = World(tmp_path, host="gpu-box")
    before = snapshot(world.root)
    known = world.configs.known_good(world.state)
    assert (known.root, known.files) == ("", ())
    world.configs.check(world.put)
    assert world.configs.put((world.put, world.none), LOOKED_FOR) == ()
    assert world.configs.keep((world.put,), LOOKED_FOR, world.state, ()) == ()
    assert snapshot(world.root) == before
    assert known.changed() == ()


def test_a_file_that_would_break_the_server_is_refused(world: World) -> None:
    write(world.tuned, {UP: '{"1": {"BLOCK_SIZE_M": 0}}'})
    with pytest.raises(MoetuneError, match="must not be installed"):
        world.configs.check(world.put)
    world.configs.check(world.flag)


def test_a_plan_without_config_arms_needs_no_directory(tmp_path: Path) -> None:
    world = World(tmp_path, config_root="")
    plan = replace(world.plan, interventions=(world.flag,))
    known = ConfigArms(plan, world.run, {}).known_good(world.state)
    assert known.root == ""
    assert not touches_files(world.flag)


def test_secrets_are_not_in_the_state_before(tmp_path: Path) -> None:
    world = World(tmp_path, environment={"HF_TOKEN": "hf_abcdefghijklmnop"})
    known = world.configs.known_good(world.state)
    assert known.environment == {"HF_TOKEN": "(redacted)"}


def test_an_interrupt_is_remembered_and_handlers_come_back() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The tests themselves may run in the background, or under nohup.
        before = signal.signal(number, signal.SIG_DFL)
        try:
            with Interrupts() as interrupts:
                interrupts.check()
                os.kill(os.getpid(), number)
                assert interrupts.cancelled()
                with pytest.raises(KeyboardInterrupt):
                    interrupts.check()
            assert signal.getsignal(number) is signal.SIG_DFL
        finally:
            signal.signal(number, before)


def test_nohup_keeps_its_meaning() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupts.cancelled()
    finally:
        signal.signal(signal.SIGHUP, before)
