"""Names that are no names never reach a file name; names that are come back as they went in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.errors import InputError
from moetune.domain.gpu import load_registry
from moetune.domain.gpu_names import check_name, nearest_names, parse_mig, parse_target, short_names

REGISTERED = [gpu.torch_name for gpu in load_registry()]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "   ",
        "../../etc/passwd",
        "NVIDIA/H100",
        "NVIDIA\\H100",
        "NVIDIA..H100",
        "NVIDIA H100\n",
        "NVIDIA\tH100",
        "\x1b[31mNVIDIA H100",
        "NVIDIA H100\x00",
        "-NVIDIA H100",
        ".hidden",
        "NVIDIA H100,dtype=fp8_w8a8",
        "E=8",
        "NVIDIA H１00",
        "NVIDIA " + "H" * 200,
    ],
)
def test_a_name_that_cannot_stand_in_a_file_name_is_refused(name: str) -> None:
    with pytest.raises(InputError) as error:
        check_name(name)
    assert error.value.message.isascii()
    assert error.value.message.isprintable()
    assert error.value.hint is not None


@given(st.text(max_size=200))
def test_whatever_is_accepted_is_safe_in_a_file_name(text: str) -> None:
    try:
        name = check_name(text)
    except InputError:
        return
    assert name.isascii()
    assert name.isprintable()
    assert not set(name) & set("/\\,=:*?\"<>|'`$&;\n\t")
    assert ".." not in name
    assert check_name(name) == name


@pytest.mark.parametrize("name", REGISTERED)
def test_case_39_every_registered_name_round_trips_with_blanks_and_with_underscores(name: str) -> None:
    assert check_name(name) == name
    assert check_name(name.replace(" ", "_")) == name


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("9.0", "9.0"),
        (" 9.0 ", "9.0"),
        ("90", "9.0"),
        ("sm_90", "9.0"),
        ("sm_90a", "9.0"),
        ("SM120", "12.0"),
        ("120", "12.0"),
        ("10.3", "10.3"),
        ("sm_103f", "10.3"),
        ("gfx942", "gfx942"),
        ("GFX950", "gfx950"),
    ],
)
def test_a_compute_capability_is_read_in_every_usual_spelling(text: str, target: str) -> None:
    assert parse_target(text) == target


@pytest.mark.parametrize(
    "text", ["", "9", "9.", "nine", "9.0.0", "sm_", "-9.0", "٩.٠", "9.0\n8.0", "9" * 400]
)
def test_what_is_no_compute_capability_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_target(text)


@given(st.integers(1, 99), st.integers(0, 9))
def test_every_compute_capability_reads_the_same_with_and_without_its_dot(major: int, minor: int) -> None:
    assert parse_target(f"{major}.{minor}") == parse_target(f"sm_{major}{minor}") == f"{major}.{minor}"


@pytest.mark.parametrize(
    ("name", "whole", "profile", "slices", "memory"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100 80GB HBM3", "1g.10gb", 1, 10),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA A100-SXM4-40GB", "3g.20gb", 3, 20),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", "NVIDIA H100 80GB HBM3", "1g.10gb+me", 1, 10),
        ("NVIDIA H200 mig 1c.3g.71gb", "NVIDIA H200", "1c.3g.71gb", 3, 71),
    ],
)
def test_the_name_of_a_mig_slice_is_taken_apart(
    name: str, whole: str, profile: str, slices: int, memory: int
) -> None:
    mig = parse_mig(name)
    assert mig is not None
    assert (mig.whole, mig.profile, mig.compute_slices, mig.memory_gb) == (whole, profile, slices, memory)


@pytest.mark.parametrize("name", REGISTERED)
def test_no_registered_name_is_taken_for_a_slice(name: str) -> None:
    assert parse_mig(name) is None


def test_short_names_leave_out_the_vendors_words_one_by_one() -> None:
    assert short_names("NVIDIA GeForce RTX 4090") == ["geforce rtx 4090", "rtx 4090"]
    assert short_names("Orin") == []


def test_nearest_names_put_shared_words_before_similar_letters() -> None:
    near = nearest_names("RTX PRO 6000", REGISTERED)
    assert all("RTX PRO 6000" in name for name in near[:3])
    assert nearest_names("H100", REGISTERED)[0] == "NVIDIA H100"
    assert nearest_names("zzzz", REGISTERED) == ()
    assert len(nearest_names("NVIDIA RTX", REGISTERED)) <= 4
