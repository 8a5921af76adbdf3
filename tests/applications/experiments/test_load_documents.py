"""What load generators write, read into one form.

The documents in `generator_results/` were written by the generators themselves against a small server on
one machine; lists of single requests are taken out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.applications.experiments.load_documents import (
    MAX_RESULT_BYTES,
    Reader,
    read_guidellm,
    read_mapped,
    read_sglang,
    read_vllm,
)
from moetune.applications.experiments.load_errors import LoadResultError
from moetune.domain.experiment import LoadResult
from moetune.domain.experiment_plan import LoadPlan

RESULTS = Path(__file__).parent / "generator_results"
TWELVE = LoadPlan("any", requests=12, concurrency=4, input_tokens=64, output_tokens=16)
EIGHT = LoadPlan("any", requests=8, concurrency=4, input_tokens=64, output_tokens=16)
READERS: Mapping[str, Reader] = {
    "sglang": read_sglang,
    "vllm": read_vllm,
    "guidellm": read_guidellm,
    "mapped": read_mapped,
}


def document(name: str) -> bytes:
    return (RESULTS / name).read_bytes()


def edited(name: str, **values: Any) -> bytes:
    """A document with other values, NaN and infinities as Python writes them."""
    return json.dumps({**json.loads(document(name)), **values}).encode()


SGLANG = "sglang-0.5.6.jsonl"
VLLM = "vllm-0.33.0.json"

# --- real documents


@pytest.mark.parametrize(
    ("name", "reader", "load"),
    [
        ("sglang-0.5.6.jsonl", read_sglang, TWELVE),
        ("sglang-0.5.23.jsonl", read_sglang, TWELVE),
        ("vllm-0.33.0.json", read_vllm, TWELVE),
        ("guidellm-0.8.1.json", read_guidellm, LoadPlan("any", requests=20)),
        ("guidellm-0.6.0.json", read_guidellm, TWELVE),
    ],
)
def test_real_documents_are_read_in_one_unit(name: str, reader: Reader, load: LoadPlan) -> None:
    result = reader(document(name), load)

    assert result.requested == result.completed == load.requests
    assert result.output_tokens_per_s == pytest.approx(result.output_tokens / result.duration_s)
    assert result.requests_per_s == pytest.approx(result.completed / result.duration_s)
    # All ran on one small server: a time in seconds or microseconds would stand out by a thousand.
    assert 1 < result.duration_s < 5
    assert result.ttft_ms is not None
    assert 1 < result.ttft_ms < 1000
    assert result.p99_ttft_ms is not None
    assert result.ttft_ms <= result.p99_ttft_ms < 1000
    assert result.mean_itl_ms is not None
    assert 0.1 < result.mean_itl_ms < 50


def test_sglang_numbers_are_the_documents_own() -> None:
    said = json.loads(document(SGLANG))

    result = read_sglang(document(SGLANG), TWELVE)

    assert result.output_tokens_per_s == pytest.approx(said["output_throughput"])
    assert result.requests_per_s == pytest.approx(said["request_throughput"])
    assert asdict(result) == {
        "requested": 12,
        "completed": 12,
        "duration_s": said["duration"],
        "input_tokens": 768,
        "output_tokens": 192,
        "output_tokens_per_s": result.output_tokens_per_s,
        "requests_per_s": result.requests_per_s,
        "ttft_ms": said["median_ttft_ms"],
        "itl_ms": said["median_itl_ms"],
        "mean_ttft_ms": said["mean_ttft_ms"],
        "mean_itl_ms": said["mean_itl_ms"],
        "p99_ttft_ms": said["p99_ttft_ms"],
        "p99_itl_ms": said["p99_itl_ms"],
    }


def test_vllm_numbers_are_the_documents_own() -> None:
    said = json.loads(document(VLLM))

    result = read_vllm(document(VLLM), TWELVE)

    assert result.output_tokens_per_s == pytest.approx(said["output_throughput"])
    assert (result.ttft_ms, result.mean_ttft_ms) == (said["median_ttft_ms"], said["mean_ttft_ms"])
    assert (result.itl_ms, result.p99_itl_ms) == (said["median_itl_ms"], said["p99_itl_ms"])


def test_guidellm_throughput_is_tokens_over_time_and_not_its_weighted_rate() -> None:
    said = json.loads(document("guidellm-0.8.1.json"))["benchmarks"][0]

    result = read_guidellm(document("guidellm-0.8.1.json"), LoadPlan("any", requests=20))

    assert result.output_tokens == 320
    assert result.output_tokens_per_s == pytest.approx(320 / said["duration"])
    assert result.ttft_ms == said["metrics"]["time_to_first_token_ms"]["successful"]["median"]
    # The median of tokens that came in one chunk with others: no time at all was measured.
    assert result.itl_ms is None


def test_a_real_document_with_a_time_before_its_request_is_refused() -> None:
    # What guidellm 0.3.1 makes of an answer whose first piece held no text.
    report = json.loads(document("guidellm-0.3.1.json"))
    times = report["benchmarks"][0]["metrics"]["time_to_first_token_ms"]["successful"]
    assert times["mean"] < 0

    with pytest.raises(LoadResultError, match=r"time_to_first_token_ms\.successful\.mean.*cannot be"):
        read_guidellm(document("guidellm-0.3.1.json"), EIGHT)
    times["mean"] = times["median"]
    result = read_guidellm(json.dumps(report).encode(), EIGHT)
    assert (result.requested, result.completed, result.output_tokens) == (8, 8, 128)


@pytest.mark.parametrize(
    ("name", "reader"),
    [("vllm-0.33.0-all-failed.json", read_vllm), ("guidellm-0.8.1-all-failed.json", read_guidellm)],
)
def test_a_run_of_failed_requests_alone_is_read_as_such(name: str, reader: Reader) -> None:
    result = reader(document(name), EIGHT)

    assert (result.requested, result.completed, result.output_tokens) == (8, 0, 0)
    assert result.ttft_ms is None


# --- numbers that are none


def test_a_rate_of_infinity_is_harmless() -> None:
    assert b'"request_rate": Infinity' in document(SGLANG)
    assert read_sglang(document(SGLANG), TWELVE).completed == 12


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    "key", ["duration", "completed", "total_output_tokens", "median_ttft_ms", "p99_itl_ms"]
)
def test_a_metric_that_is_no_number_is_refused_by_name(key: str, value: float) -> None:
    for name, reader in ((SGLANG, read_sglang), (VLLM, read_vllm)):
        with pytest.raises(LoadResultError, match=key):
            reader(edited(name, **{key: value}), TWELVE)


@pytest.mark.parametrize("value", [-1, "12", True, [12], {"a": 1}, 10**40, None])
def test_a_count_that_cannot_be_is_refused(value: Any) -> None:
    for name, reader in ((SGLANG, read_sglang), (VLLM, read_vllm)):
        with pytest.raises(LoadResultError, match="completed"):
            reader(edited(name, completed=value), TWELVE)


def test_part_of_a_request_is_refused() -> None:
    with pytest.raises(LoadResultError, match="whole number"):
        read_sglang(edited(SGLANG, completed=11.5), TWELVE)


def test_a_pass_that_took_no_time_is_refused() -> None:
    with pytest.raises(LoadResultError, match="no time"):
        read_sglang(edited(SGLANG, duration=0.0), TWELVE)


def test_a_time_of_zero_is_none_that_was_measured() -> None:
    assert read_vllm(edited(VLLM, median_itl_ms=0.0), TWELVE).itl_ms is None


def test_answers_that_ended_early_are_seen_though_the_generator_counts_what_it_asked_for() -> None:
    # Through /v1/completions sglang's generator takes the asked length; only the text tells.
    short = edited(SGLANG, total_output_tokens_retokenized=95)

    with pytest.raises(LoadResultError, match=r"95 tokens where 192 were counted.*early"):
        read_sglang(short, TWELVE)
    assert read_sglang(edited(SGLANG, total_output_tokens_retokenized=96), TWELVE).output_tokens == 192


# --- several runs


def test_the_line_of_this_run_is_taken_of_several() -> None:
    other = edited(SGLANG, max_concurrency=8, duration=99.0)

    result = read_sglang(other + b"\n" + document(SGLANG) + other, TWELVE)

    assert result.duration_s == json.loads(document(SGLANG))["duration"]


@pytest.mark.parametrize("copies", [0, 2])
def test_several_runs_of_which_none_or_two_could_be_ours_are_refused(copies: int) -> None:
    others = [edited(SGLANG, random_input_len=7), edited(SGLANG, random_input_len=8)]
    lines = others + [document(SGLANG).strip()] * copies

    with pytest.raises(LoadResultError, match=f"{2 + copies} runs, of which {copies}"):
        read_sglang(b"\n".join(lines), TWELVE)


def test_a_report_of_several_rates_is_refused() -> None:
    report = json.loads(document("guidellm-0.8.1.json"))
    report["benchmarks"] *= 2

    with pytest.raises(LoadResultError, match="2 benchmarks"):
        read_guidellm(json.dumps(report).encode(), LoadPlan("any", requests=20))


def test_more_requests_than_asked_for_are_no_full_answer() -> None:
    # 20 of 20 in the document; a plan of 30 lacks ten.
    result = read_guidellm(document("guidellm-0.8.1.json"), LoadPlan("any", requests=30))

    assert (result.requested, result.completed) == (30, 20)


# --- hostile documents


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\n\n",
        b"null",
        b"[]",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"completed": 1' + b"0" * 5000 + b"}",
        b'{"completed": 1, "completed": 2}',
        b'{"duration": 1e999}',
        b'{"completed": 12, "dur',
        b"\xff\xfe{}",
        b'\xef\xbb\xbf{"completed": 1}',
        b"Traceback (most recent call last):\n",
    ],
    ids=lambda text: f"{text[:12]!r} {len(text)}",
)
def test_a_broken_document_is_an_error_and_never_a_traceback(reader: Reader, text: bytes) -> None:
    with pytest.raises(LoadResultError):
        reader(text, MAPPED)


def test_a_document_of_many_levels_is_refused_though_its_numbers_are_there() -> None:
    levels: Any = 1
    for _ in range(60):
        levels = {"a": levels}

    for name, reader in ((SGLANG, read_sglang), (VLLM, read_vllm)):
        with pytest.raises(LoadResultError, match="deeper than"):
            reader(edited(name, extra=levels), TWELVE)


def test_a_document_over_the_limit_is_refused_before_it_is_parsed() -> None:
    text = b'{"completed": 1, "x": "' + b"a" * MAX_RESULT_BYTES + b'"}'

    with pytest.raises(LoadResultError, match="larger than"):
        read_vllm(text, TWELVE)


def test_control_characters_of_a_document_do_not_reach_the_message() -> None:
    with pytest.raises(LoadResultError) as caught:
        read_vllm(edited(VLLM, completed="\x1b]0;owned\x07\x1b[2J"), TWELVE)

    assert caught.value.message.isprintable()


def mutated(value: Any) -> st.SearchStrategy[Any]:
    """The document with any parts of it replaced by any JSON."""
    if isinstance(value, dict):
        return st.fixed_dictionaries({key: mutated(item) for key, item in value.items()}) | JSON
    return st.one_of(st.just(value), st.just(value), JSON)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("name", "reader"),
    [(SGLANG, read_sglang), (VLLM, read_vllm), ("guidellm-0.8.1.json", read_guidellm)],
)
@given(data=st.data())
def test_whatever_a_document_says_the_result_is_finite_or_refused(
    name: str, reader: Reader, data: st.DataObject
) -> None:
    whole = json.loads(document(name))
    if "benchmarks" in whole:
        run = whole["benchmarks"][0]
        part = data.draw(st.sampled_from(["duration", "metrics"]))
        run[part] = data.draw(mutated(run[part]) if part == "duration" else metrics(run[part]))
    else:
        for key in data.draw(st.lists(st.sampled_from(sorted(whole)), max_size=3)):
            whole[key] = data.draw(JSON)
    try:
        result = reader(json.dumps(whole).encode(), TWELVE)
    except LoadResultError as error:
        assert error.message.isprintable()  # noqa: PT017 - either is right
        return
    check_sound(result)


def metrics(given_metrics: dict[str, Any]) -> st.SearchStrategy[Any]:
    return st.sampled_from(sorted(given_metrics)).flatmap(
        lambda key: JSON.map(lambda value: {**given_metrics, key: value})
    )


def check_sound(result: LoadResult) -> None:
    for item in fields(result):
        value = getattr(result, item.name)
        assert value is None or (math.isfinite(value) and value >= 0), item.name
    for name in ("requested", "completed", "input_tokens", "output_tokens"):
        assert type(getattr(result, name)) is int


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(text: bytes) -> None:
    for reader in READERS.values():
        with pytest.raises(LoadResultError):
            reader(text, MAPPED)


# --- a user's own command

MAPPED = LoadPlan(
    "command",
    command=("load", "{result}"),
    requests=10,
    result={
        "completed": "counts.ok",
        "duration_s": "time / 1000",
        "output_tokens": "tokens.out",
        "ttft_ms": "latency.ttft.p50 * 1000",
        "p99_ttft_ms": "latency.ttft.p99 * 1000",
    },
)
OWN = {
    "counts": {"ok": 10},
    "time": 4000,
    "tokens": {"out": 800},
    "latency": {"ttft": {"p50": 0.25, "p99": 0.5}},
}


def test_places_and_factors_of_the_plan_are_read() -> None:
    result = read_mapped(json.dumps(OWN).encode(), MAPPED)

    assert result == LoadResult(
        requested=10,
        completed=10,
        duration_s=4.0,
        input_tokens=0,
        output_tokens=800,
        output_tokens_per_s=200.0,
        requests_per_s=2.5,
        ttft_ms=250.0,
        p99_ttft_ms=500.0,
    )


def test_a_rate_that_the_plan_names_stands() -> None:
    load = LoadPlan(
        "command", result={**MAPPED.result, "output_tokens_per_s": "steady"}, command=("x", "{result}")
    )

    assert read_mapped(json.dumps({**OWN, "steady": 210}).encode(), load).output_tokens_per_s == 210


def test_a_place_counts_into_lists_and_a_name_may_hold_dots() -> None:
    result = {**MAPPED.result, "completed": "runs.1.ok", "output_tokens": "tokens.out"}
    text = json.dumps({**OWN, "runs": [{"ok": 1}, {"ok": 9}], "tokens.out": 7}).encode()

    read = read_mapped(text, LoadPlan("command", result=result, command=("x",)))

    assert (read.completed, read.output_tokens) == (9, 7)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("counts.ok", None),
        ("time / 1000", "soon"),
        ("tokens.out", math.inf),
        ("latency.ttft.p50 * 1000", 1e300),
    ],
)
def test_what_the_document_lacks_is_named(place: str, value: Any) -> None:
    changed = json.loads(json.dumps(OWN))
    *path, last = place.partition(" ")[0].split(".")
    holder = changed
    for name in path:
        holder = holder[name]
    holder[last] = value

    with pytest.raises(LoadResultError) as caught:
        read_mapped(json.dumps(changed).encode(), MAPPED)
    assert place.partition(" ")[0] in caught.value.message


def test_a_division_by_zero_in_the_plan_is_an_error() -> None:
    load = LoadPlan("command", result={**MAPPED.result, "ttft_ms": "time / 0"}, command=("x",))

    with pytest.raises(LoadResultError, match="zero"):
        read_mapped(json.dumps(OWN).encode(), load)
