"""Provenance says what a config file is for, is the same for the same inputs, and no server reads it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.applications.provenance import (
    SCHEMA,
    Check,
    Conditions,
    Kind,
    Provenance,
    provenance_name,
    read_provenance,
    render_provenance,
    text_sha256,
)
from moetune.domain.errors import InputError
from moetune.domain.familiarity import Familiarity
from moetune.domain.identity import fingerprint, identity
from tests import wheels
from tests.generators import choices, problem, problems

if TYPE_CHECKING:
    from moetune.domain.problem import Problem

PREDICTED = Provenance(
    kind=Kind.PREDICTED,
    kernels=("up",),
    problem=problem(),
    choices=choices(),
    conditions=Conditions(noise=0.013),
    model="Qwen/Qwen3.5-122B-A10B",
    checks=(Check("fits in shared memory", True), Check("compiled for sm_90", None, "no Triton here")),
    familiarity=Familiarity(0.25, "close to what was measured"),
    added_keys=(64,),
)


@pytest.mark.parametrize("some", list(problems()), ids=lambda some: fingerprint(some)[:8])
def test_what_was_written_is_read_back(some: Problem) -> None:
    recorded = read_provenance(render_provenance(replace(PREDICTED, problem=some), "{}"), "here")
    assert recorded.kind is Kind.PREDICTED
    assert recorded.fingerprint == fingerprint(some)
    assert recorded.identity == identity(some)
    assert recorded.problem == some
    assert recorded.config_sha256 == text_sha256("{}")


def test_every_number_stands_there_with_its_kind() -> None:
    document = json.loads(render_provenance(PREDICTED, "{}"))
    assert document["schema"] == SCHEMA
    assert document["kind"] == "predicted"
    assert document["model"] == "Qwen/Qwen3.5-122B-A10B"
    assert document["conditions"] == {"l2": "cold", "noise": 0.013, "repeats": None, "spread": None}
    assert document["problem"]["routing"] == "uniform"
    assert document["problem"]["kernel_source"] == "moetune"
    assert document["problem"]["gpu"]["torch_name"] == "NVIDIA H200"
    assert document["problem"]["triton_version"] == "3.6.0"
    assert document["familiarity"] == {"distance": 0.25, "text": "close to what was measured"}
    assert [check["passed"] for check in document["checks"]] == [True, None]
    assert [entry["m"] for entry in document["entries"]] == [1, 64, 8192]
    assert document["entries"][1] == {
        "m": 64,
        "up_us": 31.3333,
        "down_us": 18.1429,
        "default_us": 89.0,
        "speedup": 1.79885,
        "reason": "beats the default by more than the noise",
    }


def test_a_default_that_cannot_run_is_said() -> None:
    first, *rest = choices().entries
    some = replace(choices(), entries=(replace(first, default_us=None), *rest))
    document = json.loads(render_provenance(replace(PREDICTED, choices=some), "{}"))
    assert document["entries"][0]["default_us"] is None
    assert document["entries"][0]["speedup"] is None


def test_equal_inputs_give_equal_bytes_without_time_host_or_path() -> None:
    text = render_provenance(PREDICTED, "{}")
    assert render_provenance(replace(PREDICTED, choices=choices()), "{}") == text
    assert list(json.loads(text)) == sorted(json.loads(text))
    # The keys are the whole list: whatever is added must not depend on when and where it ran.
    assert set(json.loads(text)) == {
        *("schema", "moetune", "kind", "kernels", "one_file", "config_sha256", "fingerprint", "identity"),
        *(
            "problem",
            "model",
            "kernel",
            "conditions",
            "checks",
            "familiarity",
            "added_keys",
            "shortfalls",
            "entries",
        ),
    }


def test_the_last_bits_of_a_time_do_not_reach_the_file() -> None:
    entries = tuple(replace(entry, up_us=entry.up_us * (1 + 1e-12)) for entry in choices().entries)
    other = replace(PREDICTED, choices=replace(choices(), entries=entries))
    assert render_provenance(other, "{}") == render_provenance(PREDICTED, "{}")


GOOD = json.loads(render_provenance(PREDICTED, "{}"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": "moetune.provenance/2"}, "moetune.provenance/2"),
        ({"schema": None}, "None"),
        ({"kind": "guessed"}, "kind"),
        ({"kind": ["predicted"]}, "kind"),
        ({"identity": "x"}, "problem"),
        ({"fingerprint": 1}, "digest"),
        ({"config_sha256": None}, "digest"),
    ],
)
def test_a_provenance_that_is_none_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        read_provenance(json.dumps(GOOD | change), "here")
    assert says in caught.value.message


def test_a_problem_of_another_version_does_not_hide_the_rest() -> None:
    recorded = read_provenance(json.dumps(GOOD | {"problem": {"E": "many"}}), "here")
    assert recorded.problem is None
    assert recorded.fingerprint == fingerprint(problem())


@given(
    st.dictionaries(
        st.sampled_from(sorted(GOOD)), st.none() | st.integers() | st.lists(st.integers()) | st.just({})
    )
)
def test_any_damage_is_an_input_error_or_read(change: dict[str, Any]) -> None:
    try:
        recorded = read_provenance(json.dumps(GOOD | change), "here")
    except InputError:
        return
    assert recorded.kind is Kind.PREDICTED


@pytest.mark.parametrize(
    ("package", "version", "member"),
    [
        ("sglang", "0.5.2", "sglang/srt/layers/moe/fused_moe_triton/fused_moe_triton_config.py"),
        ("sglang", "0.5.12", "sglang/srt/layers/moe/moe_runner/triton_utils/fused_moe_triton_config.py"),
        ("sglang", "0.5.23", "sglang/srt/layers/moe/moe_runner/triton_utils/fused_moe_triton_config.py"),
        ("vllm", "0.10.2", "vllm/model_executor/layers/fused_moe/fused_moe.py"),
        ("vllm", "0.33.0", "vllm/model_executor/layers/fused_moe/fused_moe.py"),
    ],
)
def test_no_loader_lists_the_directory_that_holds_the_sidecar(
    package: str, version: str, member: str
) -> None:
    source = wheels.read_member(package, version, member)
    listings = re.findall(r"\b(?:listdir|scandir|iterdir|glob|walk)\b", source)
    # SGLang from 0.5.12 lists `configs/` once, for the entries that begin with `triton_`.
    assert listings == (["listdir"] if (package, version) in LISTING else [])
    assert 'startswith("triton_")' in source or not listings
    assert not provenance_name("E=8,N=8,device_name=x.json").startswith("triton_")


LISTING = {("sglang", "0.5.12"), ("sglang", "0.5.23")}
