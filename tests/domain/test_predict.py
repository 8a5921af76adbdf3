"""The packaged performance model: small, safe to read, deterministic, and honest about where it stands."""

from __future__ import annotations

import io
import zipfile
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from moetune.domain.errors import UnknownGpuError
from moetune.domain.features import FEATURES
from moetune.domain.launch import Launch
from moetune.domain.predict import FIRST_FEW, PerformanceModel
from moetune.domain.quantization import Dtype, Quantization
from tests.generators import H200, RTX_PRO_6000, grid, problem

BLOCK_INT8 = Quantization(Dtype.INT8_W8A8, "blockwise_int8", block_shape=(128, 128))

ARTIFACT = resources.files("moetune.domain").joinpath("data").joinpath("performance_model.npz")


@pytest.fixture(scope="module")
def model() -> PerformanceModel:
    return PerformanceModel.load()


def launches(count: int | None = None, kernel: str = "up") -> list[Launch]:
    configs = [
        c for c in grid() if (c.block_size_m + c.block_size_n) * c.block_size_k * c.num_stages < 100_000
    ]
    return [Launch("up" if kernel == "up" else "down", config) for config in configs[:count]]


def test_the_artifact_is_small_and_holds_plain_arrays_only() -> None:
    data = ARTIFACT.read_bytes()
    assert len(data) < 1_000_000
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        assert all(arrays[name].dtype.kind in "fU" for name in arrays.files)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert all(name.endswith(".npy") for name in archive.namelist())


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    np.savez(path, features=np.array([object()], dtype=object))
    with path.open("rb") as file, pytest.raises(ValueError, match="allow_pickle"):
        PerformanceModel.read(file)


def test_an_artifact_trained_on_other_features_is_refused() -> None:
    arrays = dict(np.load(io.BytesIO(ARTIFACT.read_bytes())))
    arrays["features"] = np.array([*FEATURES[:-1], "another"])
    file = io.BytesIO()
    np.savez(file, **arrays)
    file.seek(0)
    with pytest.raises(ValueError, match=r"training\.train"):
        PerformanceModel.read(file)


def test_predicts_a_time_that_no_gpu_could_beat_by_much(model: PerformanceModel) -> None:
    """Weights of the active experts must come from memory: 37.7 MB at 4.8 TB/s is 7.9 us."""
    prediction = model.predict(problem(), "up", 1, launches())
    assert prediction.time_us.min() > 7.9 * 0.9
    assert prediction.time_us.min() < 40
    assert np.isfinite(prediction.score).all()


def test_what_is_found_among_many_is_the_same_when_asked_alone(model: PerformanceModel) -> None:
    many = launches()
    assert len(many) > FIRST_FEW
    prediction = model.predict(problem(), "down", 64, [replace(launch, kernel="down") for launch in many])
    best = int(prediction.score.argmin())
    alone = model.predict(problem(), "down", 64, [replace(many[best], kernel="down")])
    assert alone.time_us[0] == pytest.approx(prediction.time_us[best], rel=1e-4)
    assert alone.score[0] == pytest.approx(prediction.score[best], rel=1e-4)


def test_where_the_members_disagree_the_score_is_worse_than_the_time(model: PerformanceModel) -> None:
    prediction = model.predict(problem(), "up", 256, launches(100))
    spread = np.log(prediction.scenarios_us).std(0)
    assert (prediction.score >= prediction.time_us).all()
    ahead = np.log(prediction.score / prediction.time_us)
    assert np.corrcoef(spread, ahead)[0, 1] > 0.99


def test_the_same_question_gives_the_same_bytes(model: PerformanceModel) -> None:
    first, second = (model.predict(problem(), "up", 48, launches(500)) for _ in range(2))
    assert first.time_us.tobytes() == second.time_us.tobytes()
    assert first.limits == second.limits


def test_small_m_is_limited_by_memory_and_large_m_by_tensor_cores(model: PerformanceModel) -> None:
    for m, limit in ((64, "memory"), (8192, "tensor cores")):
        prediction = model.predict(problem(), "up", m, launches())
        assert prediction.limits[int(prediction.score.argmin())] == limit


def test_known_ground_has_distance_nought_and_uses_the_time_head_alone(model: PerformanceModel) -> None:
    assert model.familiarity(problem()).distance == 0
    assert model.winner_weight(problem()) == 0
    assert "NVIDIA H200" in model.familiarity(problem()).text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpu": RTX_PRO_6000}, "nothing was measured on sm_120"),
        ({"gpu": replace(H200, torch_name="NVIDIA H100 80GB HBM3")}, "of the same architecture"),
        ({"quantization": BLOCK_INT8}, "int8_w8a8+blocks was not measured"),
        ({"E": 4096, "global_experts": 4096, "N": 65536}, "no measured shape is near"),
    ],
)
def test_the_further_from_known_ground_the_more_the_winner_head_counts(
    model: PerformanceModel, change: dict[str, object], words: str
) -> None:
    far = replace(problem(), **change)  # type: ignore[arg-type]
    assert model.familiarity(far).distance > 0
    assert words in model.familiarity(far).text
    assert 0 < model.winner_weight(far) <= 1


def test_another_architecture_is_further_than_another_board(model: PerformanceModel) -> None:
    board = replace(problem(), gpu=replace(H200, torch_name="NVIDIA H100 80GB HBM3"))
    other = replace(problem(), gpu=RTX_PRO_6000)
    assert model.winner_weight(board) < model.winner_weight(other) == 1


def test_a_gpu_of_unknown_architecture_is_an_error_for_people(model: PerformanceModel) -> None:
    gpu = replace(H200, torch_name="NVIDIA L20Y", compute_capability=None, smem_optin_bytes=None)
    with pytest.raises(UnknownGpuError, match="L20Y"):
        model.predict(replace(problem(), gpu=gpu), "up", 1, launches(4))
