"""Routings drawn from a recording: whole rows, of one layer, of the rank, new for each launch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.errors import InputError
from moetune.domain.gpu import find_gpu
from moetune.domain.problem import Problem
from moetune.domain.recording import RecordedLayer, Recording
from moetune.domain.synthetic_routing import synthetic_recording
from moetune.measure.alignment import ELSEWHERE
from moetune.measure.protocol import Workload, read_request, request_json
from moetune.measure.recorded_routing import Routings
from tests.measure.cpu_backend import CpuBackend

if TYPE_CHECKING:
    from pathlib import Path

SMALL = Problem(
    E=6,
    global_experts=6,
    topk=2,
    K=64,
    N=32,
    file_n=32,
    gpu=find_gpu("NVIDIA H200"),
    server="sglang",
    server_version="0.5.23",
    triton_version="3.6.0",
)
RECORDING = synthetic_recording([3, 7], 20, 2, 6, 2, 0.8, seed=1)
RECORDED = replace(SMALL, routing=RECORDING.routing)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows_of(recording: Recording) -> list[list[list[int]]]:
    return [layer.ids.tolist() for layer in recording.layers if layer.ids is not None]


def stretches(recording: Recording, m: int) -> list[list[list[int]]]:
    """Every stretch of m rows that follow one another in a layer; round again where it is shorter."""
    found = []
    for rows in rows_of(recording):
        starts = range(len(rows) - m + 1) if len(rows) >= m else range(len(rows))
        found += [[rows[(start + number) % len(rows)] for number in range(m)] for start in starts]
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 100), st.integers(0, 1 << 30))
def test_rows_are_whole_and_follow_one_another_in_one_layer(m: int, seed: int) -> None:
    ids = Routings(RECORDED, RECORDING).draw(m, RECORDED.routing, generator(seed))
    assert ids.shape == (m, 2)
    assert ids.dtype == torch.int64
    assert ids.tolist() in stretches(RECORDING, m)


def test_launches_get_other_rows_and_all_layers_come() -> None:
    routings, source = Routings(RECORDED, RECORDING), generator()
    drawn = [routings.draw(8, RECORDED.routing, source).tolist() for _ in range(60)]
    assert len({str(ids) for ids in drawn}) > 20
    for layer in rows_of(RECORDING):
        assert any(all(row in layer for row in ids) for ids in drawn)


def test_the_first_and_the_last_rows_are_drawn_too() -> None:
    routings, source = Routings(RECORDED, RECORDING), generator()
    drawn = {str(routings.draw(39, RECORDED.routing, source).tolist()) for _ in range(80)}
    assert drawn == {str(ids) for ids in stretches(RECORDING, 39)}
    assert len(drawn) == 4


def test_a_seed_decides() -> None:
    routings = Routings(RECORDED, RECORDING)
    one, other = (routings.draw(8, RECORDED.routing, generator(5)) for _ in range(2))
    assert torch.equal(one, other)


def test_every_rank_comes_and_keeps_its_own_experts() -> None:
    """The table serves all ranks: which one it is, is drawn."""
    ids = np.array([[0, 3], [5, 1], [2, 4]], dtype=np.int32)
    recording = Recording("topk_ids", 6, True, (RecordedLayer(3, ids, (3,)),))
    problem = replace(SMALL, E=3, global_experts=6, ep=2, routing=recording.routing)
    routings, source = Routings(problem, recording), generator()
    drawn = {str(routings.draw(3, recording.routing, source).tolist()) for _ in range(40)}
    assert drawn == {
        str([[0, ELSEWHERE], [ELSEWHERE, 1], [2, ELSEWHERE]]),
        str([[ELSEWHERE, 0], [2, ELSEWHERE], [ELSEWHERE, 1]]),
    }


@pytest.mark.parametrize("recorded", [False, True])
def test_fused_shared_experts_take_every_token(recorded: bool) -> None:
    """SGLang numbers them behind the routed ones and puts them last; a recording may have them or not."""
    ids = np.array([[0, 3], [5, 1], [2, 4]], dtype=np.int32)
    if recorded:
        ids = np.hstack([ids, np.full((3, 1), 6, dtype=np.int32)])
    recording = Recording("topk_ids", 7 if recorded else 6, True, (RecordedLayer(3, ids, (3,)),))
    problem = replace(SMALL, E=7, topk=3, fused_shared_experts=1, routing=recording.routing)
    drawn = Routings(problem, recording).draw(3, recording.routing, generator())
    assert drawn.tolist() == [[0, 3, 6], [5, 1, 6], [2, 4, 6]]


def test_laws_are_drawn_beside_a_recording() -> None:
    routings = Routings(RECORDED, RECORDING)
    for law in ("uniform", "zipf:1.2"):
        ids = routings.draw(64, law, generator())
        assert ids.shape == (64, 2)
        assert all(len(set(row)) == 2 for row in ids.tolist())


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    path = tmp_path / "kept.npz"
    path.write_bytes(RECORDING.to_bytes())
    return path


def test_a_workload_names_its_recording_on_the_way_to_the_worker(kept: Path) -> None:
    workload = Workload(RECORDED, (4,), 0, str(kept))
    assert read_request(request_json(workload)) == workload
    assert Routings.of(workload).draw(4, RECORDED.routing, generator()).shape == (4, 2)


def test_another_recording_than_the_problems_is_refused(kept: Path) -> None:
    other = replace(SMALL, routing="recorded:0123456789abcdef")
    with pytest.raises(InputError, match=r"holds recorded:.*, not recorded:0123456789abcdef"):
        Routings.of(Workload(other, (4,), 0, str(kept)))
    with pytest.raises(InputError, match="not handed over"):
        Routings.of(Workload(RECORDED, (4,)))
    with pytest.raises(InputError, match="not the one that was recorded here"):
        Routings(RECORDED, RECORDING).draw(4, "recorded:0123456789abcdef", generator())


def test_the_backend_keeps_weights_cold_on_recorded_rows(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are renamed from launch to launch; how many rows each has is as recorded."""
    for name, answer in {"mem_get_info": (1 << 40, 1 << 40), "memory_allocated": 0}.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, answer=answer: answer)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    backend = CpuBackend()
    backend.open(Workload(RECORDED, (8,), 3, str(kept)))
    routed = backend._routing("up", 8)
    sorted_loads = {
        tuple(sorted(np.bincount(np.array(ids).ravel(), minlength=6))) for ids in stretches(RECORDING, 8)
    }
    loads = [tuple(sorted(torch.bincount(ids.ravel(), minlength=6).tolist())) for ids in routed.experts]
    assert set(loads) <= sorted_loads
    assert len(set(loads)) > 1
    assert len({str(ids.tolist()) for ids in routed.experts}) == len(routed.experts)
