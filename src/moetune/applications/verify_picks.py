"""Which entries a server picks for each m, and the m at which they are measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetune.applications.verify_answer import Pick
from moetune.domain.coverage import probe_ms
from moetune.domain.keys import LARGEST_M
from moetune.servers.other_kernel import cuda_kernel_until

if TYPE_CHECKING:
    from moetune.applications.verify_answer import VerifyRequest
    from moetune.domain.config import ConfigTable, KernelConfig
    from moetune.domain.problem import Kernel, Problem
    from moetune.servers.protocol import Server


def picks_of(
    server: Server,
    problem: Problem,
    up: ConfigTable | None,
    down: ConfigTable | None,
    request: VerifyRequest,
) -> tuple[Pick, ...]:
    """The stretches of m that are served by one pair of entries, each at every key that lies in it.

    Those at which the server runs a CUDA kernel of its own are none of them.

    A stretch without a key (two tables with different keys) stands there with its first m.

    Args:
        server: the release.
        problem: what the files are for.
        up: the up kernel's table; None: the server's default, at least one of them is a table.
        down: likewise; the up kernel's where one file serves both.
        request: says how far m reaches, and whether to look between the keys too.
    """
    tables = [table for table in (up, down) if table is not None]
    keys = {key for table in tables for key, _ in table.entries}
    last = min(max(request.max_m, *keys), LARGEST_M)
    start = cuda_kernel_until(server, problem) + 1
    if start > last:
        return ()
    switches = [switch for switch in server.default_switches(problem) if start <= switch < last]
    firsts = {start} | {span.first for table in tables for span in table.spans(last)}
    if up is None or down is None:
        firsts |= {switch + 1 for switch in switches}
    between = set(probe_ms(tables[0], switches, last, start)) if request.between else set()
    starts = sorted(first for first in firsts if first >= start)
    ends = [*(start - 1 for start in starts[1:]), last]
    picks = []
    for first, end in zip(starts, ends, strict=True):
        measured = {m for m in keys | between if first <= m <= end} or {first}
        picks += [
            Pick(
                m=m,
                first=first,
                last=end,
                up_key=None if up is None else up.nearest_key(m),
                down_key=None if down is None else down.nearest_key(m),
                up=_config(server, problem, "up", up, m),
                down=_config(server, problem, "down", down, m),
            )
            for m in sorted(measured)
        ]
    return tuple(picks)


def _config(
    server: Server, problem: Problem, kernel: Kernel, table: ConfigTable | None, m: int
) -> KernelConfig:
    return server.default_config(problem, kernel, m) if table is None else server.config_for(table, m)
