"""Problems go through JSON and back, and two of them are the same only when nothing differs."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from moetune.domain.codec import from_json, to_json
from moetune.domain.errors import InputError
from moetune.domain.identity import (
    differences,
    fingerprint,
    identity,
    problem_from_json,
    problem_to_json,
)
from moetune.domain.problem import Problem
from moetune.domain.quantization import Dtype, Quantization
from tests.generators import H200, RTX_PRO_6000, problem, problems

OTHER: dict[str, Any] = {
    "gpu": RTX_PRO_6000,
    "server": "vllm",
    "server_version": "0.5.22",
    "triton_version": "3.7.0",
    "gated": False,
    "bias": True,
    "activation_dtype": Dtype.FP16,
    "quantization": Quantization(Dtype.FP8_W8A8, "fp8", (128, 128)),
    "routing": "zipf:1.0",
    "kernel_source": "sglang",
    "flags": ("--enable-lora",),
}


def changed(some: Problem, name: str, value: Any) -> Problem:
    return replace(some, **{name: value})


@pytest.mark.parametrize("some", list(problems()), ids=lambda some: fingerprint(some)[:8])
def test_a_problem_round_trips_through_json(some: Problem) -> None:
    text = json.dumps(problem_to_json(some))
    assert problem_from_json(json.loads(text), "here") == some


def test_problems_that_differ_have_different_fingerprints() -> None:
    every = list(problems())
    assert len({fingerprint(some) for some in every}) == len(every)


@pytest.mark.parametrize("name", [field.name for field in fields(Problem)])
def test_every_field_of_a_problem_counts(name: str) -> None:
    some = problem()
    value = getattr(some, name)
    other = changed(some, name, value + 1 if type(value) is int else OTHER[name])
    assert fingerprint(other) != fingerprint(some)
    assert f"{name} is" in differences(identity(some), identity(other))


def test_better_numbers_of_a_gpu_make_no_other_problem() -> None:
    known_better = replace(H200, mem_bw_gbps=4700.0, confidence="medium")
    assert fingerprint(problem(gpu=known_better)) == fingerprint(problem())
    assert fingerprint(problem(gpu=replace(H200, mig_slice="3g.71gb"))) != fingerprint(problem())


def test_the_fingerprint_does_not_move() -> None:
    """It stands in files that earlier versions wrote: when it moves, they are refused."""
    assert fingerprint(problem()) == EXPECTED


EXPECTED = "8b5771dba6231694c43315d5042e8cad"


def test_case_24_the_difference_of_two_models_with_one_file_name_is_said() -> None:
    said = differences(identity(problem(K=7168)), identity(problem(K=6144)))
    assert said == "K is 7168 here and 6144 there"


def test_differences_are_few_and_of_one_kind_of_text() -> None:
    there = {"E": "\x1b[31m" + "x" * 500, "gpu": {"torch_name": "\x07evil"}, "flags": [{"a": 1}], "K": None}
    said = differences(identity(problem()), there)
    assert said.isprintable()
    assert len(said) < 600
    assert said.endswith("more")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"K": "3072"}, "here: K is '3072', not a whole number"),
        ({"K": True}, "here: K is True, not a whole number"),
        ({"K": 3072.0}, "here: K is 3072.0"),
        ({"gated": 1}, "here: gated is 1, not true or false"),
        ({"activation_dtype": "bf17"}, "here: activation_dtype is 'bf17', not one of bf16"),
        ({"flags": "x"}, "here: flags is 'x', not a list"),
        ({"flags": [1]}, "here: flags is 1, not a text"),
        ({"gpu": None}, "here: gpu is None, not an object"),
        ({"gpu": {}}, "here: gpu lacks torch_name"),
        ({"gpu": {"torch_name": "x", "compute_capability": [9]}}, "not a list of 2"),
        ({"gpu": {"torch_name": "x", "mem_bw_gbps": "fast"}}, "mem_bw_gbps is 'fast', not a number"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], says: str) -> None:
    document = problem_to_json(problem()) | change
    with pytest.raises(InputError) as caught:
        problem_from_json(document, "here")
    assert says in caught.value.message


def test_missing_fields_take_their_defaults_and_new_ones_are_passed_over() -> None:
    document = problem_to_json(problem())
    del document["flags"]
    assert problem_from_json(document | {"from_the_future": 1}, "here") == problem()
    del document["K"]
    with pytest.raises(InputError, match="lacks K"):
        problem_from_json(document, "here")
    with pytest.raises(InputError, match="not an object"):
        problem_from_json([], "here")


def test_what_has_no_json_form_is_a_fault_of_the_caller() -> None:
    with pytest.raises(TypeError, match="set"):
        to_json({1})
    with pytest.raises(TypeError, match="no JSON form"):
        from_json(set, [], "here")
