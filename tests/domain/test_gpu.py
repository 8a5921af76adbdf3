"""A GPU is found by each name it has, with limits that follow from its architecture."""

from __future__ import annotations

import csv
from importlib import resources
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.catalogue import published
from moetune.domain.errors import InputError, UnknownGpuError
from moetune.domain.gpu import Gpu, filled, find_gpu, load_registry, load_targets, whole_of

REGISTRY = load_registry()
SERVER_EDITION = "NVIDIA RTX PRO 6000 Blackwell Server Edition"

# Opt-in bytes a block, read from the drivers' documentation and by compiling: independent of the data file.
SMEM_OPTIN_BYTES = {
    "sm_80": 166912,
    "sm_86": 101376,
    "sm_87": 166912,
    "sm_89": 101376,
    "sm_90": 232448,
    "sm_100": 232448,
    "sm_103": 232448,
    "sm_110": 232448,
    "sm_120": 101376,
    "sm_121": 101376,
    "gfx942": 65536,
    "gfx950": 163840,
}


def test_names_of_the_registry_are_unique_in_any_case() -> None:
    names = [gpu.torch_name.lower() for gpu in REGISTRY]
    assert len(set(names)) == len(names)


def test_every_row_has_a_source_and_a_confidence() -> None:
    for gpu in REGISTRY:
        assert gpu.source, gpu.torch_name
        assert gpu.confidence in {"high", "medium", "low"}, gpu.torch_name
        assert gpu.vendor in {"NVIDIA", "AMD", "Intel"}, gpu.torch_name


def test_no_cell_of_the_registry_is_lost_or_out_of_range() -> None:
    text = resources.files("moetune.domain").joinpath("data").joinpath("gpus.csv").read_text("utf-8")
    for row in csv.DictReader(text.splitlines()):
        gpu = find_gpu(row["torch_name"])
        for column, low, high in (
            ("sm_count", 1, 512),
            ("l2_bytes", 2**20, 2**30),
            ("memory_gib", 1, 1024),
            ("mem_bw_gbps", 100, 20_000),
            ("bf16_dense_tflops", 10, 10_000),
            ("fp8_dense_tflops", 10, 20_000),
            ("tdp_w", 10, 3000),
        ):
            value = getattr(gpu, column)
            assert (value is None) == (row[column] == ""), (gpu.torch_name, column)
            assert value is None or low <= value <= high, (gpu.torch_name, column)


@pytest.mark.parametrize("gpu", REGISTRY, ids=lambda gpu: gpu.torch_name)
def test_a_gpu_is_found_as_torch_and_as_servers_spell_it(gpu: Gpu) -> None:
    for spelling in (gpu.torch_name, gpu.torch_name.replace(" ", "_"), gpu.torch_name.upper()):
        assert find_gpu(spelling) == gpu


@pytest.mark.parametrize("gpu", [gpu for gpu in REGISTRY if gpu.sm], ids=lambda gpu: gpu.torch_name)
def test_limits_follow_from_the_architecture(gpu: Gpu) -> None:
    assert gpu.smem_optin_bytes == SMEM_OPTIN_BYTES.get(gpu.sm)
    if gpu.smem_optin_bytes is not None and gpu.vendor == "NVIDIA":
        # One block can have all but the KiB that the driver keeps.
        assert gpu.smem_per_sm_bytes == gpu.smem_optin_bytes + 1024


def test_every_architecture_of_the_table_is_one_that_is_expected() -> None:
    names = {("sm_" + name.replace(".", "")) if "." in name else name for name in load_targets()}
    assert names == set(SMEM_OPTIN_BYTES)


def test_blackwell_is_no_compatibility_key() -> None:
    data_centre, workstation = find_gpu("NVIDIA B200"), find_gpu(SERVER_EDITION)
    assert data_centre.compute_capability == (10, 0)
    assert workstation.compute_capability == (12, 0)
    assert data_centre.smem_optin_bytes != workstation.smem_optin_bytes
    assert load_targets()["10.0"].bf16_dot != load_targets()["12.0"].bf16_dot


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("H200", "NVIDIA H200"),
        ("rtx 4090", "NVIDIA GeForce RTX 4090"),
        ("GeForce RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("RTX PRO 6000 Blackwell Server Edition", SERVER_EDITION),
        ("DGX Spark", "NVIDIA GB10"),
        ("H100 SXM", "NVIDIA H100 80GB HBM3"),
        ("MI300X", "AMD Instinct MI300X"),
        ("Jetson AGX Orin", "Orin"),
    ],
)
def test_usual_short_names_are_understood(spelling: str, name: str) -> None:
    assert find_gpu(spelling).torch_name == name


@pytest.mark.parametrize("name", ["H100", "A100", "RTX PRO 6000", "GH200", "L20Y"])
def test_a_short_name_of_several_boards_or_of_none_that_is_sure_is_not_guessed(name: str) -> None:
    with pytest.raises(UnknownGpuError) as error:
        find_gpu(name)
    assert error.value.hint is not None
    assert "--compute-capability" in error.value.hint
    assert name.split()[0] in error.value.hint


def test_a_name_that_stands_in_file_names_is_kept_as_it_is() -> None:
    # The same board under two names: a file for the one is not found by a server that says the other.
    assert find_gpu("AMD_Instinct_MI325_OAM").torch_name == "AMD Instinct MI325 OAM"
    assert find_gpu("Orin_(nvgpu)").torch_name == "Orin (nvgpu)"
    assert find_gpu("Orin_(nvgpu)").sm_count == find_gpu("Orin").sm_count


@pytest.mark.parametrize("server", ["sglang", "vllm"])
def test_every_device_of_the_published_files_is_in_the_registry(server: str) -> None:
    known = published(server)
    assert known is not None
    names = [name for files in known.directories.values() for name in files]
    devices = {name.partition("device_name=")[2].removesuffix(".json") for name in names}
    devices = {device.partition(",")[0].removesuffix("_down") for device in devices} - {""}
    assert len(devices) > 20
    for device in devices:
        assert find_gpu(device).torch_name.replace(" ", "_") == device


def test_an_unknown_gpu_works_with_its_compute_capability() -> None:
    gpu = find_gpu("NVIDIA_Foo_9000", compute_capability="sm_120a")
    assert gpu.torch_name == "NVIDIA Foo 9000"
    assert gpu.compute_capability == (12, 0)
    assert gpu.smem_optin_bytes == 101376
    assert gpu.sm_count is None
    assert gpu.vendor == "NVIDIA"
    assert find_gpu("Foo", compute_capability="gfx942").vendor == "AMD"


def test_an_unknown_gpu_without_one_names_the_nearest_and_the_option() -> None:
    with pytest.raises(UnknownGpuError) as error:
        find_gpu("NVIDIA RTX PRO 6000 Blackwell")
    assert error.value.hint is not None
    assert SERVER_EDITION in error.value.hint
    assert "--compute-capability" in error.value.hint


def test_boards_that_are_sure_are_suggested_first() -> None:
    with pytest.raises(UnknownGpuError) as error:
        find_gpu("H100")
    assert error.value.hint is not None
    offered = [name for name in error.value.hint.split("'") if name.startswith("NVIDIA")]
    assert offered[-1] == "NVIDIA H100"
    assert "NVIDIA H100 80GB HBM3" in offered


def test_an_architecture_without_known_limits_is_refused() -> None:
    with pytest.raises(UnknownGpuError, match=r"13\.7"):
        find_gpu("NVIDIA Foo", compute_capability="13.7")


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("NVIDIA H200", "12.0"),
        ("AMD Instinct MI300X", "9.0"),
        ("NVIDIA H200", "gfx942"),
        ("Intel(R) Arc(TM) Pro B60 Graphics", "9.0"),
    ],
)
def test_a_compute_capability_that_the_registry_contradicts_is_an_error(name: str, capability: str) -> None:
    with pytest.raises(InputError):
        find_gpu(name, compute_capability=capability)


def test_a_compute_capability_completes_a_row_that_lacks_it() -> None:
    assert find_gpu("NVIDIA L20Y").smem_optin_bytes is None
    assert find_gpu("NVIDIA L20Y", compute_capability="9.0").smem_optin_bytes == 232448
    assert find_gpu("NVIDIA H200", compute_capability="9.0") == find_gpu("NVIDIA H200")


def test_a_number_of_multiprocessors_given_by_hand_wins() -> None:
    assert find_gpu("NVIDIA H200", sm_count=100).sm_count == 100
    for nonsense in (0, -1, 10**9):
        with pytest.raises(InputError):
            find_gpu("NVIDIA H200", sm_count=nonsense)


def test_a_mig_slice_is_a_device_of_its_own() -> None:
    part, whole = find_gpu("NVIDIA_H100_80GB_HBM3_MIG_1g.10gb"), find_gpu("NVIDIA H100 80GB HBM3")
    assert part.torch_name == "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    assert part.mig_slice == "1g.10gb"
    assert part.compute_capability == whole.compute_capability
    assert part.smem_optin_bytes == whole.smem_optin_bytes
    for size in ("sm_count", "l2_bytes", "mem_bw_gbps", "bf16_dense_tflops", "fp8_dense_tflops"):
        assert getattr(part, size) is None
    assert whole_of(part) == whole
    assert whole_of(whole) is None
    assert find_gpu(part.torch_name, sm_count=16).sm_count == 16


def test_a_slice_of_an_unknown_gpu_needs_the_compute_capability_too() -> None:
    with pytest.raises(UnknownGpuError):
        find_gpu("NVIDIA Foo MIG 1g.10gb")
    part = find_gpu("NVIDIA Foo MIG 1g.10gb", compute_capability="9.0")
    assert part.smem_optin_bytes == 232448
    assert filled(part).sm_count < filled(find_gpu("NVIDIA H200")).sm_count / 7


@given(st.text(max_size=80).filter(lambda text: text.strip().lower() not in {"h200", "b200"}))
def test_any_other_text_is_refused_with_a_printable_message_and_a_hint(text: str) -> None:
    with pytest.raises(InputError) as error:
        find_gpu(text)
    assert error.value.hint
    assert error.value.message.isprintable()


RUNNABLE = [gpu for gpu in REGISTRY if gpu.smem_optin_bytes is not None]


@pytest.mark.parametrize("gpu", RUNNABLE, ids=lambda gpu: gpu.torch_name)
def test_filling_keeps_what_is_known_and_says_what_it_estimated(gpu: Gpu) -> None:
    full = filled(gpu)
    for field in ("sm_count", "l2_bytes", "mem_bw_gbps", "bf16_dense_tflops", "fp8_dense_tflops"):
        known, value = getattr(gpu, field), getattr(full, field)
        assert value > 0
        assert (field in full.estimated) == (known is None)
        assert known is None or value == known


def test_estimates_come_from_the_nearest_relatives() -> None:
    # Same product before same architecture: an H20-3e is no H100.
    relative, estimate = find_gpu("NVIDIA H20"), filled(find_gpu("NVIDIA H20-3e"))
    assert estimate.sm_count == relative.sm_count == 78
    assert estimate.bf16_dense_tflops == relative.bf16_dense_tflops
    # Same architecture where the product is not known: the median of the rows that know it.
    ada = sorted(gpu.l2_bytes for gpu in REGISTRY if gpu.sm == "sm_89" and gpu.l2_bytes)
    estimated = filled(find_gpu("NVIDIA Foo", compute_capability="8.9")).l2_bytes
    assert ada[(len(ada) - 1) // 2] <= estimated <= ada[len(ada) // 2]


def test_a_rate_is_estimated_by_the_multiprocessors() -> None:
    small = filled(find_gpu("NVIDIA Foo", compute_capability="9.0", sm_count=20))
    large = filled(find_gpu("NVIDIA Foo", compute_capability="9.0", sm_count=100))
    assert large.bf16_dense_tflops == pytest.approx(5 * small.bf16_dense_tflops)
    assert large.fp8_dense_tflops == pytest.approx(2 * large.bf16_dense_tflops)


def test_an_architecture_without_fp8_dots_gets_no_faster_by_fp8() -> None:
    full = filled(find_gpu("NVIDIA A100-SXM4-80GB"))
    assert full.fp8_dense_tflops == full.bf16_dense_tflops
    assert "fp8_dense_tflops" in full.estimated


def test_slices_are_smaller_than_the_whole_and_grow_with_their_profile() -> None:
    whole = filled(find_gpu("NVIDIA H100 80GB HBM3"))
    parts = [
        filled(find_gpu(f"NVIDIA H100 80GB HBM3 MIG {profile}"))
        for profile in ("1g.10gb", "2g.20gb", "3g.40gb")
    ]
    for field in ("sm_count", "l2_bytes", "mem_bw_gbps", "bf16_dense_tflops"):
        sizes = [getattr(part, field) for part in (*parts, whole)]
        assert all(smaller < larger for smaller, larger in pairwise(sizes)), field
    # As nvidia-smi lists that profile of this GPU.
    assert parts[0].sm_count == 16
    assert all("sm_count" in part.estimated for part in parts)


@pytest.mark.parametrize("name", ["NVIDIA L20Y", "AMD Radeon Graphics", "Intel(R) Arc(TM) Pro B60 Graphics"])
def test_nothing_is_predicted_for_an_unknown_architecture(name: str) -> None:
    with pytest.raises(UnknownGpuError, match="architecture"):
        filled(find_gpu(name))
