"""Recordings: found, read from what SGLang's own recorder writes, written for its tuner, tuned under."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from moetune.applications.measure_request import MeasureRequest
from moetune.applications.measured_answer import MeasuredTuning
from moetune.applications.request import TuneRequest
from moetune.applications.routing_files import find_files, opened
from moetune.applications.routing_store import (
    ask_routing,
    check_fits,
    find_kept,
    keep,
    kept_for,
    named_routing,
)
from moetune.applications.routings import TUNER_ROWS, for_tuner, read_recording, write_directory
from moetune.applications.tuning_measured import tune_measured
from moetune.applications.verify_answer import VerifyRequest
from moetune.applications.verifying import verify
from moetune.domain.errors import InputError, MoetuneError, OutputError
from moetune.domain.recording import RecordedLayer, Recording
from moetune.domain.synthetic_routing import draw_ids, synthetic_recording
from tests.applications.fake_machine import PROBLEM, FakeMachine
from tests.measure.recorder import recorder

if TYPE_CHECKING:
    from moetune.domain.recording import IdArray

RELEASES = ("0.4.9", "0.5.4", "0.5.23")
"""The first that was read, the last without counts beside experts, the last."""
LAYERS = (2, 3, 5)  # 0, 1 and 4 are dense


def drawn(tokens: int, seed: int, experts: int = 16, topk: int = 4) -> IdArray:
    return draw_ids(tokens, experts, topk, 0.8, np.random.default_rng(seed))


def passes(*tokens: int) -> list[dict[int, torch.Tensor]]:
    return [
        {layer: torch.from_numpy(drawn(count, 10 * number + layer)) for layer in LAYERS}
        for number, count in enumerate(tokens)
    ]


def save(folder: Path, **files: IdArray) -> Path:
    """Files `topk_ids_{name}.pt`."""
    folder.mkdir(exist_ok=True)
    for name, ids in files.items():
        torch.save(torch.from_numpy(ids), folder / f"topk_ids_{name}.pt")
    return folder


# --- what SGLang writes -----------------------------------------------------------------------------


@pytest.mark.parametrize("release", RELEASES)
def test_what_sglangs_own_recorder_writes_is_read(release: str, tmp_path: Path) -> None:
    """Two ranks with their own tokens, a dense layer between, fewer experts a token than its 8 columns."""
    served = [passes(20, 3), passes(7, 5)]
    made = recorder(release, tmp_path, experts=16, layers=6)
    for rank, own in enumerate(served):
        made.per_token(own, rank)
    found = read_recording([tmp_path])
    assert found.files == 2
    assert found.remarks == ()
    assert (found.recording.form, found.recording.experts, found.recording.experts_known) == (
        "per_token",
        16,
        True,
    )
    assert [layer.number for layer in found.recording.layers] == list(LAYERS)
    for layer in found.recording.layers:
        expected = [call[layer.number].tolist() for own in served for call in own]
        assert layer.ids is not None
        assert sorted(layer.calls) == [3, 5, 7, 20]
        assert sorted(layer.ids.tolist()) == sorted(row for call in expected for row in call)


def test_ranks_that_recorded_the_same_tokens_count_once(tmp_path: Path) -> None:
    made = recorder("0.5.23", tmp_path, experts=16, layers=6)
    for rank in range(2):
        made.per_token(passes(20, 3), rank)
    found = read_recording([tmp_path])
    assert found.recording.layers[0].calls == (20, 3)
    assert "ranks 1" in found.remarks[0] or "ranks 0" in found.remarks[0]


@pytest.mark.parametrize("mode", ["per_pass", "stat"])
def test_counts_are_read_as_counts(mode: str, tmp_path: Path) -> None:
    own = passes(20, 3)
    recorder("0.5.23", tmp_path, experts=16, layers=6).counts(mode, own)
    found = read_recording([tmp_path])
    assert found.recording.form == mode
    assert not found.recording.has_ids
    assert "counts only" in found.remarks[0]
    for layer in found.recording.layers:
        expected = [torch.bincount(call[layer.number].ravel(), minlength=16).tolist() for call in own]
        assert layer.loads_of_calls(16).tolist() == expected
    with pytest.raises(InputError, match="counts only"):
        for_tuner(found.recording)
    with pytest.raises(InputError, match="counts only") as caught:
        keep(tmp_path / "state", found.recording)
    assert "per_token" in str(caught.value.hint)


# --- files --------------------------------------------------------------------------------------------


def test_a_directory_of_the_tuner_is_read(tmp_path: Path) -> None:
    """Layers in the order of their numbers, not of their names; what else lies there is passed over."""
    files = {
        f"layer{layer}_idx{index}": drawn(9, 10 * layer + index) for layer in (3, 10) for index in (0, 1)
    }
    folder = save(tmp_path / "ids", **files)
    (folder / "notes.txt").write_text("mine")
    (folder / "topk_ids_layer3_idx0.pt.bak").write_bytes(b"x")
    found = read_recording([folder])
    assert [layer.number for layer in found.recording.layers] == [3, 10]
    for layer in found.recording.layers:
        whole = np.concatenate([files[f"layer{layer.number}_idx{index}"] for index in (0, 1)])
        assert np.array_equal(layer.ids, whole)  # type: ignore[arg-type]
        assert layer.calls == (9, 9)
    assert not found.recording.experts_known
    assert "--experts" in found.remarks[0]


def test_the_number_of_experts_can_be_given(tmp_path: Path) -> None:
    folder = save(tmp_path / "ids", layer3_idx0=drawn(9, 1))
    known = read_recording([folder], experts=64).recording
    assert (known.experts, known.experts_known) == (64, True)
    with pytest.raises(InputError, match=r"layer 3: expert \d+ is none of the 8"):
        read_recording([folder], experts=8)


def test_padded_rows_are_no_tokens(tmp_path: Path) -> None:
    ids = drawn(9, 1)
    ids[6:] = -1
    layer = read_recording([save(tmp_path / "ids", layer3_idx0=ids)]).recording.layers[0]
    assert layer.tokens == 6


def test_two_recordings_at_once_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "ids", layer3_idx0=drawn(4, 1))
    (folder / "expert_distribution_recorder_1.5_0.pt").write_bytes(b"x")
    with pytest.raises(InputError, match="two recordings"):
        find_files([folder])
    other = save(tmp_path / "other", layer3_idx0=drawn(4, 2))
    with pytest.raises(InputError, match="two files of call 0"):
        find_files([other, folder / "topk_ids_layer3_idx0.pt"])


def test_files_of_two_models_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "ids", layer3_idx0=drawn(4, 1), layer4_idx0=drawn(4, 1, topk=2))
    with pytest.raises(InputError, match="another model"):
        read_recording([folder])


def test_a_tensor_of_another_name_is_refused_with_the_name_that_it_needs(tmp_path: Path) -> None:
    torch.save(torch.from_numpy(drawn(4, 1)), tmp_path / "ids.pt")
    with pytest.raises(InputError, match="does not hold what its name says") as caught:
        read_recording([tmp_path / "ids.pt"])
    assert "topk_ids_layer3_idx0.pt" in str(caught.value.hint)


def test_what_is_not_there_or_no_plain_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "topk_ids_layer3_idx0.pt")
    (tmp_path / "empty").mkdir()
    for path, why in (
        (tmp_path, "no plain file"),
        (tmp_path / "none", "cannot be read"),
        ("/dev/zero", "no plain"),
    ):
        with pytest.raises(InputError, match=why), opened(find_files([path])):
            pass
    with pytest.raises(InputError, match="holds no recording"):
        find_files([tmp_path / "empty"])
    with pytest.raises(InputError, match="layer 9999"):
        find_files([tmp_path / "topk_ids_layer9999_idx0.pt"])


def test_links_in_a_directory_are_not_followed(tmp_path: Path) -> None:
    secret = save(tmp_path / "ids", layer3_idx0=drawn(4, 1)) / "topk_ids_layer3_idx0.pt"
    (tmp_path / "bait").mkdir()
    link = tmp_path / "bait" / secret.name
    link.symlink_to(secret)
    with pytest.raises(InputError, match="cannot be read"), opened(find_files([tmp_path / "bait"])):
        pass
    with opened(find_files([link])) as (file,):  # the user named it
        assert file.size == secret.stat().st_size


def test_sizes_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huge = tmp_path / "topk_ids_layer3_idx0.pt"
    huge.touch()
    os.truncate(huge, (2 << 30) + 1)
    with pytest.raises(InputError, match="larger than 2 GiB"), opened(find_files([huge])):
        pass
    monkeypatch.setattr("moetune.applications.routing_files.MAX_FILES", 1)
    with pytest.raises(InputError, match="more than the 1"):
        find_files([save(tmp_path / "ids", layer3_idx0=drawn(2, 1), layer3_idx1=drawn(2, 1))])


def test_many_numbers_are_refused_before_they_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path / "ids", layer3_idx0=drawn(4, 1), layer3_idx1=drawn(4, 1))
    monkeypatch.setattr("moetune.applications.routings.fresh_room", lambda: {"ids": 20, "counts": 0})
    with pytest.raises(InputError, match=r"idx1\.pt is refused: more numbers than may come"):
        read_recording([folder])


# --- for SGLang's tuner ---------------------------------------------------------------------------------


def as_the_tuner_loads(folder: Path, sample: int, layers: int, dense: int) -> Any:
    """The rule of `load_topk_ids` (SGLang, benchmark/kernels/fused_moe_triton, in our words)."""
    with_experts = layers - dense
    layer, index = sample % with_experts + dense, sample // with_experts
    return torch.load(folder / f"topk_ids_layer{layer}_idx{index}.pt")


def test_the_tuner_finds_all_its_samples_in_what_is_written(tmp_path: Path) -> None:
    """100 of 61 layers of which 3 are dense, whatever the model is."""
    made = synthetic_recording(range(3, 61), 12, 2, 32, 4, 1.2, seed=3)
    names = write_directory(made, tmp_path / "out")
    assert len(names) == 2 * 58
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == sorted(names)
    for sample in (0, 57, 58, 99):
        ids = as_the_tuner_loads(tmp_path / "out", sample, 61, 3)
        assert ids.dtype == torch.int32
        layer = made.layers[sample % 58]
        assert layer.ids is not None
        assert ids.tolist() == layer.ids[12 * (sample // 58) :][:12].tolist()
    back = read_recording([tmp_path / "out"], experts=32).recording
    assert back.identifier == made.identifier


def test_a_dump_becomes_two_large_calls_a_layer(tmp_path: Path) -> None:
    recorder("0.5.23", tmp_path, experts=16, layers=6).per_token(passes(20, 3, 7))
    recording = read_recording([tmp_path]).recording
    whole, remarks = for_tuner(recording)
    assert [layer.calls for layer in whole.layers] == [(15, 15)] * 3
    assert "over 15" in remarks[0]
    enough = RecordedLayer(0, drawn(2 * TUNER_ROWS, 1), (TUNER_ROWS, TUNER_ROWS))
    assert for_tuner(Recording("topk_ids", 16, True, (enough,)))[1] == ()


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path: Path) -> None:
    made = synthetic_recording([3], 4, 1, 8, 2, 0.0, seed=1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "full")
    for name in ("full", "link", "full/mine"):
        with pytest.raises(OutputError):
            write_directory(made, tmp_path / name)
    broken = tmp_path / "broken"
    with pytest.raises(MoetuneError):
        write_directory(made, broken, "/bin/false")
    assert not broken.exists()
    assert {entry.name for entry in tmp_path.iterdir()} == {"full", "link"}


# --- tuning under it ------------------------------------------------------------------------------------


def test_what_is_asked_for_gets_one_name(tmp_path: Path) -> None:
    assert ask_routing("uniform", tmp_path).name == "uniform"
    assert ask_routing("zipf:1.20", tmp_path).name == "zipf:1.2"
    assert ask_routing("zipf:0", tmp_path).name == "uniform"
    for text in ("zipf:x", "zipf:9", "nothing-of-that-name", "recorded:0123456789abcdef"):
        with pytest.raises(InputError):
            ask_routing(text, tmp_path)


def test_a_recording_is_kept_by_its_content_and_found_again(tmp_path: Path) -> None:
    folder = save(tmp_path / "ids", layer3_idx0=drawn(50, 1))
    state = tmp_path / "state"
    asked = ask_routing(str(folder), state)
    assert asked.recording is not None
    assert asked.name == asked.recording.routing
    assert Path(asked.path) == state / "routings" / f"{asked.recording.identifier}.npz"
    assert (state / "routings").stat().st_mode & 0o077 == 0
    again = ask_routing(asked.name, state)
    assert again.recording is not None
    assert again.recording.identifier == asked.recording.identifier
    assert find_kept(state, asked.name) == Path(asked.path)
    assert find_kept(state, "recorded:0123456789abcdef") is None
    assert find_kept(state, "recorded:../../../etc/passwd") is None
    assert "50" in asked.remarks_for(8192)[-1]
    assert asked.remarks_for(50) == asked.remarks


OF_8 = Recording(
    "topk_ids", 256, False, (RecordedLayer(3, draw_ids(40, 256, 8, 0.0, np.random.default_rng(0)), (40,)),)
)


def changed(column: int, value: int) -> Recording:
    ids = OF_8.layers[0].ids
    assert ids is not None
    ids = ids.copy()
    ids[5, column] = value
    return replace(OF_8, experts=4096, layers=(replace(OF_8.layers[0], ids=ids),))


@pytest.mark.parametrize(
    ("recording", "why"),
    [
        (changed(2, 256), "has expert 256, the model has 256"),
        (changed(2, -1), "tokens without an expert"),
        (replace(OF_8, experts=128, experts_known=True), "of 128 experts, the model has 256"),
        (synthetic_recording([3], 4, 1, 256, 6, 0.0, 0), "have 6 experts, those of the model 8"),
        (
            Recording("stat", 256, True, (RecordedLayer(3, counts=np.ones((1, 256), dtype=np.int64)),)),
            "counts",
        ),
    ],
)
def test_a_recording_of_another_model_is_refused(recording: Recording, why: str) -> None:
    check_fits(OF_8, PROBLEM)
    with pytest.raises(InputError, match=why):
        check_fits(recording, PROBLEM)


def test_columns_of_fused_experts_may_stand_in_it() -> None:
    problem = replace(PROBLEM, E=257, topk=9, fused_shared_experts=1)
    ids = OF_8.layers[0].ids
    assert ids is not None
    check_fits(OF_8, problem)
    for last, fits in ((256, True), (3, False)):
        wide = np.hstack([ids, np.full((40, 1), last, dtype=np.int32)])
        recording = Recording("topk_ids", 257, False, (RecordedLayer(3, wide, (40,)),))
        if fits:
            check_fits(recording, problem)
        else:
            with pytest.raises(InputError, match="fused"):
                check_fits(recording, problem)


def tune(machine: FakeMachine, routing: str) -> MeasuredTuning:
    request = MeasureRequest(
        experts=256,
        topk=8,
        hidden=3072,
        intermediate=256,
        server="sglang",
        server_version="0.5.23",
        triton_version="3.6.0",
        m="1,64,2048",
        max_m=2048,
        out=machine.folder / "out",
        state=machine.folder / "state",
        budget=20.0,
        routing=routing,
    )
    return tune_measured(request, {}, gpus=machine.devices(), command=machine.command, pool=machine.pool)


def read_kept(path: str) -> str:
    return Recording.from_bytes(Path(path).read_bytes(), path).routing


def test_tuning_measures_under_a_recording_and_says_so_everywhere(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    folder = save(tmp_path / "ids", layer3_idx0=drawn(300, 1, 256, 8), layer5_idx0=drawn(300, 2, 256, 8))
    name = read_recording([folder]).recording.routing
    tuned = tune(machine, str(folder))
    document = tuned.to_json()
    assert document["routing"] == name
    assert any("fewer than" in remark for remark in document["routing_remarks"])
    (opened_with,) = machine.log("open")
    assert read_kept(opened_with["recording"]) == name
    header = json.loads(tuned.journal.read_text().splitlines()[0])
    assert header["identity"]["routing"] == name
    layers = [
        line for line in map(json.loads, tuned.journal.read_text().splitlines()) if line["kind"] == "layer"
    ]
    assert {line["key"].split()[1] for line in layers} == {name, "uniform"}
    for file in tuned.files:
        provenance = json.loads(file.provenance.read_text())
        assert provenance["problem"]["routing"] == name
        assert any(f"{name} and uniform" in check["name"] for check in provenance["checks"])
    (tmp_path / "other").mkdir()
    uniform = tune(FakeMachine(tmp_path / "other"), "uniform")
    assert uniform.to_json()["routing"] == "uniform"
    assert uniform.journal.parent.name != tuned.journal.parent.name
    assert uniform.to_json()["routing_remarks"] == []


def test_verifying_measures_under_the_kept_recording_or_says_that_it_is_gone(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    folder = save(tmp_path / "ids", layer3_idx0=drawn(3000, 1, 256, 8))
    tuned = tune(machine, str(folder))
    name = tuned.to_json()["routing"]
    for kept, measured_under in ((True, name), (False, "uniform")):
        if not kept:
            (tmp_path / "state" / "routings" / f"{name.partition(':')[2]}.npz").unlink()
        (tmp_path / "log").unlink()
        request = VerifyRequest(
            paths=tuple(file.path for file in tuned.files), state=tmp_path / "state", max_m=2048
        )
        answer = verify(request, {}, gpus=machine.devices(), command=machine.command, pool=machine.pool)
        remarks = answer.problems[0].gpu.remarks
        assert any("is not kept here" in remark for remark in remarks) != kept
        assert bool(machine.log("open")[0]["recording"]) == kept
        assert measured_under in {line["routing"] for line in machine.log("layer")}
        assert (name in {line["routing"] for line in machine.log("layer")}) == kept


def test_a_routing_that_somebody_else_names_is_one_or_none(tmp_path: Path) -> None:
    """Provenance comes with files of other people."""
    names = [
        "uniform",
        "zipf:1.20",
        "recorded:0123456789abcdef",
        "zipf:99",
        "recorded:../../x",
        "\x1b[31m",
        "",
    ]
    found = [named_routing(name) for name in names]
    assert found == ["uniform", "zipf:1.2", "recorded:0123456789abcdef", *["uniform"] * 4]
    other = synthetic_recording([3], 40, 1, 64, 6, 0.0, 0)
    keep(tmp_path, other)
    keep(tmp_path, OF_8)
    assert kept_for(tmp_path, replace(PROBLEM, routing=OF_8.routing)) is not None
    assert kept_for(tmp_path, replace(PROBLEM, routing=other.routing)) is None


def test_a_recording_that_does_not_fit_costs_no_measurement(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    with pytest.raises(InputError, match="have 4 experts"):
        tune(machine, str(save(tmp_path / "ids", layer3_idx0=drawn(300, 1))))
    assert machine.log("start") == []


def test_predictions_are_of_uniform_routing() -> None:
    assert TuneRequest().measured_routing == "uniform"
