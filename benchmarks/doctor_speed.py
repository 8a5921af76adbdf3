"""How fast doctor reads: megabytes of log a second of one core, for several kinds of log.

    python benchmarks/doctor_speed.py [--megabytes 200]

Ordinary logs are requests and batches, as 99% of a real log is. The others are what would be slow:
lines of other programs, tracebacks without end, one line of the size of a log.
"""

from __future__ import annotations

import argparse
import gzip
import io
import resource
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.applications.doctor import read_logs

if TYPE_CHECKING:
    from collections.abc import Callable

_LOGS = Path(__file__).parents[1] / "tests" / "logs"
_SGLANG = (
    "[2026-12-01 12:{m:02d}:{s:02d} TP0] Decode batch, #running-req: {n}, #token: {t}, token usage: 0.31, "
    "cuda graph: True, gen throughput (token/s): {t}.12, #queue-req: 0\n"
    '[2026-12-01 12:{m:02d}:{s:02d}] INFO:     127.0.0.1:{t} - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
    "[2026-12-01 12:{m:02d}:{s:02d} TP0] Prefill batch, #new-seq: 1, #new-token: {n}, #cached-token: 1, "
    "token usage: 0.12, #running-req: 3, #queue-req: 0, cuda graph: False, input throughput (token/s): {t}\n"
)
_VLLM = (
    '(APIServer pid=101) INFO:     127.0.0.1:{t} - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
    "(APIServer pid=101) INFO 10-08 11:{m:02d}:{s:02d} [loggers.py:127] Engine 000: Avg prompt throughput: "
    "{n}.0 tokens/s, Avg generation throughput: {t}.1 tokens/s, Running: {n} reqs, Waiting: 0 reqs, "
    "GPU KV cache usage: 0.1%, Prefix cache hit rate: 0.0%\n"
)
_OTHER = "2026-12-01 10:{m:02d}:{s:02d},123 some.other.program handled item {t} of queue {n} in no time\n"
_TRACE = (
    "[2026-12-01 10:{m:02d}:{s:02d} TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
    '  File "/pkg/sglang/srt/layers/moe/moe_runner/triton_utils/fused_moe.py", line {n}, in run\n'
    "    x = y\nRuntimeError: something else went wrong {t}\n"
)


def repeated(template: str) -> Callable[[int], bytes]:
    """A log that repeats a template with changing numbers."""

    def build(size: int) -> bytes:
        block = "".join(
            template.format(m=i // 60 % 60, s=i % 60, n=i % 48, t=30000 + i % 30000) for i in range(2000)
        ).encode()
        return block * (size // len(block) + 1)

    return build


def real(size: int) -> bytes:
    """A start, then a day of requests."""
    start = (_LOGS / "sglang-0.5.6-rtx-pro-6000.log").read_bytes()
    return start + repeated(_SGLANG)(size)


KINDS: dict[str, Callable[[int], bytes]] = {
    "sglang, a day": real,
    "vllm, a day": repeated(_VLLM),
    "another program": repeated(_OTHER),
    "tracebacks": repeated(_TRACE),
    "one long line": lambda size: b"word " * (size // 5),
}


def main() -> None:
    """Print a line for each kind of log."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    size = parser.parse_args().megabytes * 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "server.log"
        for kind, build in KINDS.items():
            path.write_bytes(build(size))
            before = time.process_time()
            facts = read_logs([str(path)])
            spent = time.process_time() - before
            (source,) = facts.sources
            print(f"{kind:18}  {source.size_bytes / spent / 1e6:7.0f} MB/s  {source.lines:9} lines")
        packed = gzip.compress(real(size), 6)
        before = time.process_time()
        read_logs(["server.log.gz"], io.BytesIO(packed))
        print(f"{'the first, gzip':18}  {size / (time.process_time() - before) / 1e6:7.0f} MB/s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory {peak:.0f} MiB, of which {3 * size >> 20} MiB or less hold the logs that were made")


if __name__ == "__main__":
    main()
