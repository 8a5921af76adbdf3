"""Whose tuned files are worth a look: best first, with the reason, never as if they were equal."""

from __future__ import annotations

from itertools import pairwise

import pytest

from moetune.domain.gpu import Gpu, find_gpu, load_registry
from moetune.domain.gpu_siblings import siblings

SERVER = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
WORKSTATION = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
MAX_Q = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"


def names(gpu: str) -> list[str]:
    return [sibling.gpu.torch_name for sibling in siblings(find_gpu(gpu))]


@pytest.mark.parametrize(
    ("gpu", "best", "second"),
    [(SERVER, WORKSTATION, MAX_Q), (WORKSTATION, SERVER, MAX_Q), (MAX_Q, SERVER, WORKSTATION)],
)
def test_case_23_three_editions_are_three_names_and_each_others_best_siblings(
    gpu: str, best: str, second: str
) -> None:
    assert names(gpu)[:2] == [best, second]
    assert len({find_gpu(name) for name in (SERVER, WORKSTATION, MAX_Q)}) == 3


def test_case_23_less_power_is_said_and_trusted_less() -> None:
    workstation, max_q = siblings(find_gpu(SERVER))[:2]
    assert "300" in max_q.reason
    assert "power" in max_q.reason
    assert (workstation.confidence, max_q.confidence) == ("high", "medium")


def test_case_23_h20_and_h20_3e_are_siblings_and_not_equal() -> None:
    assert names("NVIDIA H20")[0] == "NVIDIA H20-3e"
    assert names("NVIDIA H20-3e")[0] == "NVIDIA H20"
    sibling = siblings(find_gpu("NVIDIA H20-3e"))[0]
    assert sibling.confidence == "low"
    assert "not known of both: multiprocessors" in sibling.reason


def test_rtx_pro_6000_is_near_sm_120_then_sm_89_and_far_from_b200() -> None:
    near = siblings(find_gpu(SERVER))
    assert [sibling.gpu.sm for sibling in near[:4]] == ["sm_120"] * 4
    assert near[4].gpu.sm == "sm_89"
    assert not {"sm_100", "sm_103", "sm_90", "sm_80"} & {sibling.gpu.sm for sibling in near}


@pytest.mark.parametrize("gpu", load_registry(), ids=lambda gpu: gpu.torch_name)
def test_a_sibling_has_the_same_instructions_and_no_more_shared_memory(gpu: Gpu) -> None:
    for sibling in siblings(gpu):
        assert sibling.gpu.torch_name != gpu.torch_name
        assert sibling.gpu.vendor == gpu.vendor
        assert sibling.reason
        assert sibling.confidence in {"high", "medium", "low"}
        if gpu.smem_optin_bytes is not None:
            assert sibling.gpu.smem_optin_bytes is not None
            assert sibling.gpu.smem_optin_bytes <= gpu.smem_optin_bytes


@pytest.mark.parametrize("gpu", load_registry(), ids=lambda gpu: gpu.torch_name)
def test_the_same_architecture_comes_before_any_other(gpu: Gpu) -> None:
    same = [sibling.gpu.sm == gpu.sm for sibling in siblings(gpu)]
    assert all(earlier or not later for earlier, later in pairwise(same))


def test_bf16_only_relatives_are_named_so() -> None:
    reasons = {sibling.gpu.sm: sibling.reason for sibling in siblings(find_gpu("NVIDIA L40S"))}
    assert "bf16 only" in reasons["sm_86"]
    assert "bf16 only" not in reasons["sm_120"]


@pytest.mark.parametrize("name", ["AMD Radeon Graphics", "NVIDIA L20Y", "Intel(R) Arc(TM) Pro B60 Graphics"])
def test_a_name_that_is_no_identity_has_no_siblings_and_is_nobodys(name: str) -> None:
    assert siblings(find_gpu(name)) == ()
    for gpu in load_registry():
        assert name not in [sibling.gpu.torch_name for sibling in siblings(gpu)]


def test_one_board_under_two_names_says_so() -> None:
    best = siblings(find_gpu("AMD Instinct MI325 OAM"))[0]
    assert best.gpu.torch_name == "AMD Instinct MI325X"
    assert best.reason.startswith("the same board under another name")
    (orin, *_) = siblings(find_gpu("Orin (nvgpu)"))
    assert (orin.gpu.torch_name, orin.reason, orin.confidence) == (
        "Orin",
        "the same board under another name",
        "high",
    )
    # Two rows of which little is known are not therefore one board.
    reasons = [sibling.reason for sibling in siblings(find_gpu("NVIDIA GH200 480GB"))]
    assert not any("same board" in reason for reason in reasons)


def test_a_slice_has_only_its_whole_and_with_low_confidence() -> None:
    part = find_gpu("NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    (sibling,) = siblings(part)
    assert sibling.gpu == find_gpu("NVIDIA H100 80GB HBM3")
    assert sibling.confidence == "low"
    assert siblings(find_gpu("NVIDIA Foo MIG 1g.10gb", compute_capability="9.0")) == ()


def test_an_unregistered_gpu_gets_siblings_by_its_architecture() -> None:
    near = siblings(find_gpu("NVIDIA Foo", compute_capability="10.0"))
    assert near[0].gpu.sm == "sm_100"
    assert {sibling.confidence for sibling in near} == {"low"}
