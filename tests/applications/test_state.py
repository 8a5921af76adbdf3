"""Where the state lives, and which state root believes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moetune.applications.state import private_folder, state_path
from moetune.domain.errors import InputError, OutputError

HOME = {"HOME": "/home/user"}


@pytest.mark.parametrize(
    ("option", "environ", "path"),
    [
        ("/a", {"MOETUNE_STATE": "/b", "XDG_STATE_HOME": "/c", **HOME}, "/a"),
        (None, {"MOETUNE_STATE": "/b", "XDG_STATE_HOME": "/c", **HOME}, "/b"),
        (None, {"MOETUNE_STATE": "", "XDG_STATE_HOME": "/c", **HOME}, "/c/moetune"),
        (None, {"XDG_STATE_HOME": "relative", **HOME}, "/home/user/.local/state/moetune"),
        (None, HOME, "/home/user/.local/state/moetune"),
    ],
)
def test_flag_then_variable_then_xdg(option: str | None, environ: dict[str, str], path: str) -> None:
    assert state_path(option, environ) == Path(path)


def test_a_relative_flag_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert state_path("state", {}) == tmp_path / "state"


@pytest.mark.parametrize("environ", [{}, {"HOME": ""}, {"HOME": "relative"}])
def test_without_a_home_it_asks_for_a_flag(environ: dict[str, str]) -> None:
    with pytest.raises(InputError) as failed:
        state_path(None, environ)
    assert "--state" in str(failed.value.hint)


def test_the_home_of_nobody_is_no_place() -> None:
    with pytest.raises(InputError, match="the home of ~0 is unknown"):
        state_path("~0/state", {})


def test_what_is_made_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = private_folder(tmp_path / "new" / "state", "installs", make=True)
    finally:
        os.umask(before)
    assert folder is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.parent.stat().st_mode & 0o777 == 0o700


def test_only_looking_makes_nothing(tmp_path: Path) -> None:
    assert private_folder(tmp_path / "state", "installs", make=False) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_records_that_others_can_write_are_not_believed(mode: int, tmp_path: Path) -> None:
    folder = private_folder(tmp_path, "installs", make=True)
    assert folder is not None
    folder.chmod(mode)
    for make in (True, False):
        with pytest.raises(OutputError, match="can be written by others") as failed:
            private_folder(tmp_path, "installs", make=make)
        assert "--state" in str(failed.value.hint)


def test_records_that_are_a_link_are_not_believed(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "installs").symlink_to(tmp_path / "theirs")
    with pytest.raises(OutputError, match="link"):
        private_folder(tmp_path / "state", "installs", make=True)


def test_records_of_another_user_are_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private_folder(tmp_path, "installs", make=True)
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(OutputError, match="belongs to the user"):
        private_folder(tmp_path, "installs", make=True)


class TestRoot:
    """For root the way to the records must be root's as well."""

    @pytest.fixture(autouse=True)
    def _only_root(self) -> None:
        if os.geteuid() != 0:
            pytest.skip("the owner of a directory can only be set by root")

    @pytest.fixture
    def state(self, tmp_path: Path) -> Path:
        state = tmp_path / "way" / "state"
        private_folder(state, "installs", make=True)
        return state

    def test_its_own_is_believed(self, state: Path) -> None:
        assert private_folder(state, "installs", make=True) == state / "installs"

    def test_a_state_directory_that_others_can_write(self, state: Path) -> None:
        state.chmod(0o777)
        with pytest.raises(OutputError, match="can be written by others"):
            private_folder(state, "installs", make=True)

    def test_a_state_directory_of_another_user(self, state: Path) -> None:
        os.chown(state, 65534, 65534)
        with pytest.raises(OutputError, match="belongs to the user 65534"):
            private_folder(state, "installs", make=True)

    def test_a_way_that_others_can_change(self, state: Path) -> None:
        state.parent.chmod(0o777)
        with pytest.raises(OutputError, match="above the state directory"):
            private_folder(state, "installs", make=True)
        # In a sticky directory nobody can exchange what is another's.
        state.parent.chmod(0o1777)
        assert private_folder(state, "installs", make=True)

    def test_a_way_of_another_user(self, state: Path) -> None:
        os.chown(state.parent, 65534, 65534)
        with pytest.raises(OutputError, match="above the state directory"):
            private_folder(state, "installs", make=True)

    def test_a_link_to_somebody_elses(self, state: Path, tmp_path: Path) -> None:
        os.chown(state.parent, 65534, 65534)
        (tmp_path / "link").symlink_to(state)
        with pytest.raises(OutputError, match="above the state directory"):
            private_folder(tmp_path / "link", "installs", make=True)
