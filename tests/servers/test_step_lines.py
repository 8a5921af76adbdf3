from __future__ import annotations

import pytest

from moetune.servers.step_lines import NEEDLES, decode_rate, speculates

SGLANG_LINES = {
    # Forms of specs by release: before 0.5.9 a comma ended the line, the order of two fields changed.
    "0.5.6": "[2026-12-01 10:00:00 TP0] Decode batch, #running-req: 48, #token: 9, token usage: 0.1, "
    "cuda graph: True, gen throughput (token/s): 2400.00, #queue-req: 0, ",
    "0.5.9": "[2026-12-01 10:00:00 DP1 TP2] Decode batch, #running-req: 48, #token: 9, token usage: 0.1, "
    "cuda graph: True, gen throughput (token/s): 2400.00, #queue-req: 0",
    "with its number": "[2026-12-01 10:00:00] Decode batch [40], #running-req: 48, #full token: 9, "
    "full token usage: 0.1, cuda graph: True, gen throughput (token/s): 2400.00, #queue-req: 0",
}


@pytest.mark.parametrize("form", SGLANG_LINES)
def test_a_decode_line_of_sglang(form: str) -> None:
    rate = decode_rate(SGLANG_LINES[form])
    assert rate is not None
    assert (rate.running, rate.tokens_per_s, rate.step_us) == (48, 2400.0, 20_000.0)


def test_a_step_of_speculation_has_more_than_a_token_of_each_request() -> None:
    line = SGLANG_LINES["0.5.9"].replace("cuda graph", "accept len: 2.50, cuda graph")
    rate = decode_rate(line)
    assert rate is not None
    assert rate.step_us == 50_000.0


def test_a_line_of_vllm() -> None:
    line = (
        "INFO 12-01 10:00:00 [loggers.py:257] Engine 000: Avg prompt throughput: 99.0 tokens/s, "
        "Avg generation throughput: 2400.0 tokens/s, Running: 48 reqs, Waiting: 0 reqs"
    )
    rate = decode_rate(line)
    assert rate is not None
    assert (rate.server, rate.running, rate.step_us) == ("vllm", 48, 20_000.0)
    assert any(needle in line.encode() for needle in NEEDLES)
    assert not speculates(line)
    assert speculates("INFO [metrics.py:100] SpecDecoding metrics: Mean acceptance length: 2.1")


@pytest.mark.parametrize("text", ["#running-req: 0", "#running-req: 48"])
def test_a_server_with_nothing_to_do_has_no_step(text: str) -> None:
    line = SGLANG_LINES["0.5.9"].replace("#running-req: 48", text)
    assert decode_rate(line.replace("2400.00", "0.00")) is None
