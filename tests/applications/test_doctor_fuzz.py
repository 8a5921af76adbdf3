"""Ten thousand mutated logs, from a seed: a finding or a clear error, never a traceback, never a hang."""

from __future__ import annotations

import gzip
import io
import random
from pathlib import Path

import pytest

from moetune.applications.doctor import diagnose
from moetune.applications.doctor_solve import Known
from moetune.domain.errors import MoetuneError

LOGS = Path(__file__).parents[1] / "logs"
COUNT = 10_000
PART = 1_000
SEEDS = range(COUNT // PART)

SPICE = [
    b"\x00",
    b"\xff\xfe",
    b"\x1b[31m",
    b"\n",
    b"\r",
    b"\r\n",
    b"'",
    b'"',
    b"\\",
    b"{",
    b"[" * 40,
    b"]",
    b", ",
    b"=",
    b"E=",
    b"N=999999,",
    b"E=0,N=0,",
    b"device_name=",
    b"..",
    b"/",
    b".json",
    b"_down.json",
    b"triton_",
    b"block_shape=[0, 0]",
    b"block_shape=[99999, 1]",
    b"dtype=",
    b"out of resource: shared memory, Required: 147456, Hardware limit: 101376",
    b"Required: 999999999999, Hardware limit: 0",
    b"server_args=ServerArgs(",
    b"tp_size=0",
    b"tp_size=64, ep_size=7",
    b"ValueError: ",
    b"KeyError: 'BLOCK_SIZE_M'",
    b"Using default MoE kernel config. ",
    b"Config file not found at ",
    b"Capture cuda graph bs [0, 1, 999999999]",
    b"chunked_prefill_size=-1",
    b"Initializing a V1 LLM engine (v99.99.99rc1.dev0+g0) with config: ",
    b"vLLM API server version 0.1\n",
    b"vLLM API server version x\n",
    "\u202e\u2028".encode(),
    b"9" * 30,
]


def lines() -> list[bytes]:
    """Lines of all logs, each once, long ones cut."""
    found: dict[bytes, None] = {}
    for path in sorted(LOGS.rglob("*.log")):
        for line in path.read_bytes().splitlines():
            found[line[:700]] = None
    return list(found)


def mutated(rng: random.Random, pool: list[bytes]) -> bytes:
    """A few lines, cut, doubled, shuffled, spiced, their digits changed."""
    chosen = [rng.choice(pool) for _ in range(rng.randint(1, 8))]
    data = bytearray(rng.choice((b"\n", b"\n", b"\r\n", b"")).join(chosen))
    for _ in range(rng.randint(0, 12)):
        place = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0:
            data[place:place] = rng.choice(SPICE)
        elif kind == 1:
            del data[place : place + rng.randint(1, 40)]
        elif kind == 2 and data:
            data[place % len(data)] = rng.randrange(256)
        elif kind == 3:
            data[place:place] = data[place : place + rng.randint(1, 200)]
        else:
            data[place : place + 1] = str(rng.randrange(10)).encode()
    raw = bytes(data)
    wrapping = rng.randrange(20)
    if wrapping == 0:
        packed = gzip.compress(raw)
        return packed[: rng.randrange(len(packed) + 1)]
    if wrapping == 1:
        width = rng.randint(20, 160)
        return b"\n".join(raw[i : i + width] for i in range(0, len(raw), width))
    return raw


@pytest.mark.timeout(120)  # a hang is a failure
@pytest.mark.parametrize("seed", SEEDS)
def test_mutated_logs(seed: int) -> None:
    rng = random.Random(seed)
    pool = lines()
    found = errors = 0
    for _ in range(PART):
        data = mutated(rng, pool)
        known = Known(model="Qwen/Qwen3-30B-A3B") if rng.random() < 0.05 else Known()
        try:
            diagnosis = diagnose(["fuzzed.log"], known, stream=io.BytesIO(data))
        except MoetuneError:
            errors += 1
            continue
        found += len(diagnosis.findings)
        for finding in diagnosis.findings:
            assert finding.message.isprintable(), finding.message
            assert finding.mend.replace("\n", "").isprintable()
            assert all(value.isprintable() for _, value in finding.facts)
        diagnosis.to_json()
    # The fuzzer reaches the findings, not only the errors.
    assert found > PART // 10
    assert errors < PART // 2
