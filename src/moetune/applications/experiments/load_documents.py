"""What load generators write, read into one form: hostile text in, a `LoadResult` or an error out.

The formats were read in the generators' published wheels and in documents that they wrote:
sglang 0.5.6 `bench_serving.py:benchmark` and 0.5.23 `benchmark/serving.py:benchmark`; vllm 0.10.2, 0.33.0
`benchmarks/serve.py:benchmark`; guidellm 0.3.1, 0.6.0 and 0.8.1 (`benchmarks.json`).

A throughput is never taken over from a document: it is what was counted over how long it took. The
generators' own rates differ in what they mean (guidellm weights by time), and none is missed by this.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from moetune.applications.experiments.load_errors import LoadResultError
from moetune.domain.experiment import LoadResult
from moetune.domain.experiment_plan import LoadPlan
from moetune.domain.safe_json import JsonLimits, JsonObject, load_json_object
from moetune.domain.text import printable

MAX_RESULT_BYTES = 64 << 20
"""guidellm keeps each request; 10,000 of them with their prompts are about that much."""

_LIMITS = JsonLimits(max_bytes=MAX_RESULT_BYTES, max_depth=48, non_finite=True)
_MAX_RUNS = 1024
_MAX_COUNT = 1 << 53
_OPTIONAL = ("ttft_ms", "itl_ms", "mean_ttft_ms", "mean_itl_ms", "p99_ttft_ms", "p99_itl_ms")
_COUNTS = ("requested", "completed", "input_tokens", "output_tokens")
_FIELDS = tuple(item.name for item in fields(LoadResult))
_FACTOR = re.compile(r"(?P<place>\S+)(?: (?P<sign>[*/]) (?P<factor>\d{1,12}(?:\.\d{1,12})?|\.\d{1,12}))?")

Reader = Callable[[bytes, LoadPlan], LoadResult]
"""What a generator wrote, and for which load, to its result."""


def read_sglang(text: bytes, load: LoadPlan) -> LoadResult:
    """Read the JSON lines of `sglang.bench_serving`, one a run.

    It has no count of failed requests. `request_rate` is a bare `Infinity` in every release.

    Raises:
        LoadResultError: for what is no such document.
    """
    run = _line_of_this_run(text, load)
    values = _Values(run, "the result of sglang.bench_serving")
    retokenized = values.get("total_output_tokens_retokenized")
    output_tokens = values.number("total_output_tokens")
    # Through /v1/completions this generator takes the asked length for the real one unless the server
    # counts in each chunk (async_request_openai_completions in both releases). Its text cannot be that
    # much shorter.
    if isinstance(retokenized, (int, float)) and not isinstance(retokenized, bool):
        written = float(retokenized)
        if math.isfinite(written) and 0 <= written < output_tokens / 2:
            raise LoadResultError(
                f"the answers hold {written:.0f} tokens where {output_tokens:.0f} were counted:"
                " requests end early, and the generator counts what it asked for",
                "with an SGLang server leave --backend at sglang, which reads what the server counts",
            )
    return result_of(
        values,
        {
            "requested": load.requests,
            "completed": values.number("completed"),
            "duration_s": values.number("duration"),
            "input_tokens": values.number("total_input_tokens"),
            "output_tokens": output_tokens,
            **_latencies(values),
        },
    )


def read_vllm(text: bytes, load: LoadPlan) -> LoadResult:
    """Read the document of `vllm bench serve`.

    Raises:
        LoadResultError: for what is no such document.
    """
    del load
    values = _Values(_document(text, "the result of vllm bench serve"), "the result of vllm bench serve")
    return result_of(
        values,
        {
            "requested": values.number("num_prompts"),
            "completed": values.number("completed"),
            "duration_s": values.number("duration"),
            "input_tokens": values.number("total_input_tokens"),
            "output_tokens": values.number("total_output_tokens"),
            **_latencies(values),
        },
    )


def read_guidellm(text: bytes, load: LoadPlan) -> LoadResult:
    """Read the report of guidellm, which has to hold one benchmark.

    Raises:
        LoadResultError: for what is no such document.
    """
    what = "the report of guidellm"
    values = _Values(_document(text, what), what)
    runs = values.get("benchmarks")
    if not isinstance(runs, list) or len(runs) != 1:
        raise LoadResultError(
            f"{what} holds {len(runs) if isinstance(runs, list) else 'no list of'} benchmarks"
            " where one is expected",
            "leave out arguments that make it run several rates",
        )
    run = _Values(runs[0] if isinstance(runs[0], dict) else {}, what)
    # 0.3 has the counts beside the metrics, later releases among them.
    totals = "request_totals" if run.get("request_totals") is not None else "metrics.request_totals"
    completed = run.number(f"{totals}.successful")
    # Where no request came through there are no metrics; that is told first.
    given: dict[str, float | None] = {
        "requested": max(float(load.requests), run.number(f"{totals}.total")),
        "completed": completed,
        "duration_s": run.number("duration"),
        "input_tokens": run.number("metrics.prompt_token_count.successful.total_sum", 0.0),
        "output_tokens": run.number("metrics.output_token_count.successful.total_sum", 0.0),
    }
    for name, metric in (("ttft_ms", "time_to_first_token_ms"), ("itl_ms", "inter_token_latency_ms")):
        place = f"metrics.{metric}.successful"
        given[name] = run.optional(f"{place}.median")
        given[f"mean_{name}"] = run.optional(f"{place}.mean")
        given[f"p99_{name}"] = run.optional(f"{place}.percentiles.p99")
    return result_of(run, given)


def read_mapped(text: bytes, load: LoadPlan) -> LoadResult:
    """Read the JSON document of a user's own command with the places that the plan names.

    Raises:
        LoadResultError: for what is no JSON object, or lacks what the plan says of it.
    """
    what = "the result of the load command"
    values = _Values(_document(text, what), what)
    given: dict[str, float | None] = {
        name: values.scaled(place) for name, place in load.result.items() if name in _FIELDS
    }
    given.setdefault("requested", float(load.requests))
    given.setdefault("input_tokens", 0.0)
    missing = [name for name in ("completed", "duration_s", "output_tokens") if name not in given]
    if missing:
        raise LoadResultError(f"the plan's [load.result] does not say where {', '.join(missing)} stand")
    return result_of(values, given, rates_given=True)


class _Values:
    """A document, and what of it is asked for by dotted names.

    Args:
        document: the object.
        what: it is, for messages.
    """

    def __init__(self, document: Mapping[str, Any], what: str) -> None:
        self._document, self.what = document, what

    def get(self, place: str) -> Any:  # noqa: ANN401 - any JSON value
        """What stands at a place; None where nothing does."""
        if place in self._document:
            return self._document[place]
        found: Any = self._document
        for name in place.split("."):
            if isinstance(found, Mapping) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isascii() and name.isdigit() and len(name) < 6:
                found = found[int(name)] if int(name) < len(found) else None
            else:
                return None
        return found

    def number(self, place: str, default: float | None = None) -> float:
        """The number at a place; without a default it has to be there."""
        value = self.get(place)
        if value is None and default is not None:
            return default
        return self._finite(value, place)

    def optional(self, place: str) -> float | None:
        """The number at a place; None where nothing or nothing measured stands."""
        value = self.get(place)
        if value is None:
            return None
        # Generators write 0 where they have no single sample: no time is 0.
        return self._finite(value, place) or None

    def scaled(self, place: str) -> float:
        """The number at a place with an optional factor behind it: `metrics.ttft.p50 * 1000`."""
        found = _FACTOR.fullmatch(place)
        if found is None:
            raise LoadResultError(f"{printable(place)} is no place in a document")
        value = self.number(found["place"])
        factor = float(found["factor"] or 1)
        if found["sign"] == "/":
            if factor == 0:
                raise LoadResultError(f"{printable(place)} divides by zero")
            factor = 1 / factor
        return self._finite(value * factor, place)

    def _finite(self, value: Any, place: str) -> float:  # noqa: ANN401 - any JSON value
        if value is None:
            raise LoadResultError(f"{self.what} has no {printable(place)}")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise LoadResultError(
                f"{printable(place)} in {self.what} is {printable(repr(value), 40)}, which is no number"
            )
        # Neither NaN nor an infinity lies between, and a whole number of 60 digits stays one here.
        if not 0 <= value <= _MAX_COUNT:
            raise LoadResultError(
                f"{printable(place)} in {self.what} is {printable(str(value), 40)}, which cannot be"
            )
        return float(value)


def result_of(values: _Values, given: Mapping[str, float | None], *, rates_given: bool = False) -> LoadResult:
    """Make a result of the numbers of a document.

    Args:
        values: the document.
        given: fields of `LoadResult` to numbers.
        rates_given: a throughput that is given stands; otherwise it follows from count and duration.
    """
    numbers = {name: given.get(name) for name in _FIELDS}
    for name in _COUNTS:
        count = numbers[name] or 0.0
        if count != int(count):
            raise LoadResultError(f"{name} in {values.what} is {count}, which is no whole number")
        numbers[name] = int(count)
    duration_s = numbers["duration_s"] or 0.0
    if duration_s <= 0:
        raise LoadResultError(f"{values.what} says that the pass took no time")
    for rate, counted in (("output_tokens_per_s", "output_tokens"), ("requests_per_s", "completed")):
        if not (rates_given and numbers[rate]):
            numbers[rate] = (numbers[counted] or 0) / duration_s
    return LoadResult(**numbers)  # type: ignore[arg-type] # the required ones are numbers by now


def _latencies(values: _Values) -> dict[str, float | None]:
    """Times as SGLang's and vLLM's generators name them; both are in milliseconds."""
    return {
        name: values.optional(f"median_{name}" if name in ("ttft_ms", "itl_ms") else name)
        for name in _OPTIONAL
    }


def _document(text: bytes, what: str) -> JsonObject:
    return load_json_object(text, what, _LIMITS, LoadResultError)


_OWN = {
    "max_concurrency": "concurrency",
    "random_input_len": "input_tokens",
    "random_output_len": "output_tokens",
}


def _line_of_this_run(text: bytes, load: LoadPlan) -> JsonObject:
    """The one line that is of this run; a generator that ran several times wrote one for each."""
    what = "the result of sglang.bench_serving"
    lines = [line for line in text.split(b"\n", _MAX_RUNS + 1) if line.strip()]
    if not lines:
        raise LoadResultError(f"{what} is empty")
    if len(lines) > _MAX_RUNS:
        raise LoadResultError(f"{what} holds more than {_MAX_RUNS} lines")
    runs = [_document(line, f"{what} (line {number})") for number, line in enumerate(lines, 1)]
    if len(runs) == 1:
        return runs[0]
    ours = [run for run in runs if all(run.get(key) == getattr(load, field) for key, field in _OWN.items())]
    if len(ours) != 1:
        raise LoadResultError(
            f"{what} holds {len(runs)} runs, of which {len(ours)} have the plan's concurrency and lengths",
            "have the command run the generator once",
        )
    return ours[0]
