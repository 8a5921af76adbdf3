"""The rules of lint and borrow: coverage, pairs, places, repairs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.config import ConfigTable, KernelConfig
from moetune.domain.gpu import find_gpu
from moetune.domain.launch import Launch
from moetune.domain.rules import FAR, find, launch_faults, meetings, nearest_runnable, uncovered

RTX = find_gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition")
MI300X = find_gpu("AMD Instinct MI300X")
TRITON = (3, 8, 0)
PLAIN = KernelConfig(64, 64, 64, 1)

tables = st.lists(st.integers(1, 9000), min_size=1, max_size=12, unique=True).map(
    lambda keys: ConfigTable(tuple((key, PLAIN) for key in keys))
)


def table(*keys: int) -> ConfigTable:
    return ConfigTable(tuple((key, PLAIN) for key in keys))


def fp8(config: KernelConfig, block_k: int = 0) -> Launch:
    return Launch("up", config, a_bits=8, b_bits=8, block_k=block_k)


def codes(launch: Launch, gpu: object = RTX) -> list[str]:
    return [fault.code for fault in launch_faults(launch, gpu, TRITON)]  # type: ignore[arg-type]


class TestLaunches:
    def test_case_26_four_stages_of_fp8_do_not_fit_a_workstation_card(self) -> None:
        (fault,) = launch_faults(fp8(KernelConfig(128, 256, 128, 32, 8, 4)), RTX, TRITON)
        assert fault.code == "MOE111"
        assert "147,456" in fault.text
        assert "101,376" in fault.text
        assert codes(fp8(KernelConfig(128, 256, 128, 32, 8, 3))) == []

    def test_case_26_three_stages_do_not_fit_an_mi300x(self) -> None:
        (fault,) = launch_faults(fp8(KernelConfig(64, 128, 128, 1, 4, 3)), MI300X, TRITON)
        assert (fault.code, "73,728" in fault.text, fault.fatal) == ("MOE111", True, True)
        assert codes(fp8(KernelConfig(64, 128, 128, 1, 4, 2)), MI300X) == []

    def test_two_stages_on_amd_are_doubted_only_while_one_fits(self) -> None:
        published = Launch("up", KernelConfig(128, 256, 64, 1, 8, 2))  # ships for MI300X in vllm 0.33.0
        (fault,) = launch_faults(published, MI300X, TRITON)
        assert (fault.code, fault.fatal) == ("MOE152", False)
        assert codes(Launch("up", KernelConfig(256, 256, 128, 1, 8, 2)), MI300X) == ["MOE111"]

    def test_a_tile_over_the_group_is_wrong_and_one_below_it_is_not(self) -> None:
        assert codes(fp8(KernelConfig(16, 64, 256, 1), block_k=128)) == ["MOE121"]
        assert codes(fp8(KernelConfig(16, 64, 128, 1), block_k=128)) == []
        assert codes(fp8(KernelConfig(16, 64, 64, 1), block_k=128)) == []

    def test_what_the_server_itself_gets_wrong_is_wrong(self) -> None:
        wrong = Launch(
            "down", PLAIN, sorted_input=True, weights_by_tma=True, wrong_numbers="rows are mixed up"
        )
        (fault,) = launch_faults(wrong, find_gpu("NVIDIA H200"), TRITON)
        assert (fault.code, fault.text, fault.fatal) == ("MOE122", "rows are mixed up", True)

    def test_grouped_weights_have_a_scale_each(self) -> None:
        launch = Launch("up", KernelConfig(16, 64, 256, 1, 4, 2), a_bits=16, b_bits=4, block_k=128)
        assert "MOE121" not in codes(launch)

    def test_what_does_not_compile_has_a_code_of_its_own(self) -> None:
        assert codes(fp8(KernelConfig(16, 64, 16, 1))) == ["MOE112"]
        assert codes(Launch("up", KernelConfig(16, 64, 64, 1, 64))) == ["MOE112"]

    def test_what_only_wastes_time_is_no_fault(self) -> None:
        assert codes(Launch("up", KernelConfig(16, 16, 16, 1, 8, 2))) == []


class TestCoverage:
    def test_case_30_keys_that_begin_high(self) -> None:
        (stretch,) = uncovered(table(96, 128, 256, 512, 1024), 1024)
        assert (stretch.first, stretch.last, stretch.key) == (1, 47, 96)

    def test_case_31_keys_that_end_low(self) -> None:
        (stretch,) = uncovered(table(1, 2, 4, 8, 16, 32, 64), 8192)
        assert (stretch.first, stretch.last, stretch.key) == (129, 8192, 64)

    def test_the_servers_own_keys_leave_nothing_out(self) -> None:
        own = table(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
        assert uncovered(own, 8192) == ()
        assert uncovered(own, 8193) != ()

    @given(tables, st.integers(1, 10_000))
    def test_the_stretches_are_exactly_the_far_m(self, some: ConfigTable, last: int) -> None:
        expected = set()
        for m in range(1, last + 1):
            key = some.nearest_key(m)
            if m > FAR * key or key > FAR * m:
                expected.add((m, key))
        found = {(m, part.key) for part in uncovered(some, last) for m in range(part.first, part.last + 1)}
        assert found == expected


@given(tables, tables, st.integers(1, 3000))
def test_meetings_are_what_the_server_pairs(up: ConfigTable, down: ConfigTable, last: int) -> None:
    met = meetings(up, down, last)
    assert all(meeting.first <= meeting.last for meeting in met)
    found = {
        m: (meeting.up_key, meeting.down_key)
        for meeting in met
        for m in range(meeting.first, meeting.last + 1)
    }
    assert found == {m: (up.nearest_key(m), down.nearest_key(m)) for m in range(1, last + 1)}


def test_no_pair_meets_without_entries() -> None:
    assert meetings(table(1), ConfigTable(()), 8) == ()


def test_a_name_is_found_in_the_first_directory_that_has_it() -> None:
    directories = {"triton_3_8_0": {"a"}, "triton_3_5_1": {"a", "b"}, "triton_3_1_0": {"b"}}
    order = ("triton_3_8_0", "triton_3_5_1", "triton_3_1_0")
    assert find("a", directories, order).exact
    stale = find("b", directories, order)
    assert (stale.directory, stale.exact, stale.behind) == ("triton_3_5_1", False, ("triton_3_1_0",))
    assert find("c", directories, order).directory is None


class TestRepair:
    def test_one_stage_less_is_nearest(self) -> None:
        config = KernelConfig(128, 256, 128, 32, 8, 4)
        first = nearest_runnable(config, lambda new: not codes(fp8(new)))[0]
        assert first == KernelConfig(128, 256, 128, 32, 8, 3)

    def test_everything_offered_runs_and_the_kept_tile_is_kept(self) -> None:
        config = KernelConfig(128, 256, 128, 32, 8, 5)
        near = nearest_runnable(config, lambda new: not codes(fp8(new)), keep_block_m=True)
        assert near
        assert all(not codes(fp8(new)) for new in near)
        assert {new.block_size_m for new in near} == {128}
        assert {new.group_size_m for new in near} == {32}

    def test_where_nothing_runs_nothing_is_offered(self) -> None:
        assert nearest_runnable(KernelConfig(128, 256, 128, 32, 8, 4), lambda _: False) == ()

    @pytest.mark.parametrize("stages", [2**31 - 1, 64])
    def test_an_absurd_config_ends_soon(self, stages: int) -> None:
        assert nearest_runnable(KernelConfig(2**20, 2**20, 2**20, 1, 32, stages), lambda _: False) == ()
