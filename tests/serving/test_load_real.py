"""A real load generator on a real server: its numbers are read, a real difference of kernels is in them."""

from __future__ import annotations

import json
from statistics import median
from urllib.request import urlopen

import pytest

from moetune.applications.experiments.load import measure, run_pass
from moetune.applications.experiments.load_errors import LoadError
from moetune.domain.experiment import LoadResult
from tests.serving.conftest import Real


def measured(real: Real, implementation: str) -> tuple[LoadResult, ...]:
    """Two passes of one start, after one that does not count."""
    with real.running(real.server(implementation), implementation) as server:
        results = measure(
            real.load(8, 48, 4, passes=2), server.url, str(real.model), real.folder, implementation
        )
        assert f"experts_implementation={implementation}" in server.log.read_text()
    return results


def test_every_request_is_answered_in_full_and_the_faster_kernel_is_seen(real: Real) -> None:
    by_kernel = {name: measured(real, name) for name in ("batched_mm", "grouped_mm")}

    for results in by_kernel.values():
        assert len(results) == 2
        for result in results:
            assert (result.requested, result.completed) == (8, 8)
            assert (result.input_tokens, result.output_tokens) == (8 * 48, 8 * 4)
            assert result.output_tokens_per_s > 0
            assert result.ttft_ms is not None
            assert result.ttft_ms > 0
    rates = {
        name: median(result.output_tokens_per_s for result in results) for name, results in by_kernel.items()
    }
    # About 6 with prompts that long, and 2 with short ones, which a busy machine hides.
    assert rates["grouped_mm"] > 1.5 * rates["batched_mm"], rates


def test_a_server_that_refuses_every_request_gives_no_numbers(real: Real) -> None:
    load = real.load()
    with real.running(real.server("grouped_mm"), "refusing") as server:
        with urlopen(f"{server.url}/v1/models", timeout=10) as answer:
            assert json.load(answer)["data"][0]["id"] == str(real.model)
        with pytest.raises(LoadError) as caught:
            # Pinned to one model, it answers 400 to a request for another one.
            run_pass(load, server.url, str(real.model) + "/", real.folder, "refused")

    assert "sglang.bench_serving failed with exit status 1" in caught.value.message
    assert "Warmup failed" in (real.folder / "refused.log").read_text()
