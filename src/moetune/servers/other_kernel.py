"""The m at which a server runs a CUDA kernel of its own in place of the Triton kernel.

No config is chosen for them. But a file replaces the default at every m, so that its table holds an
entry for each of them with which the server does what it does without a file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from moetune.domain.config import ConfigTable, KernelConfig

if TYPE_CHECKING:
    from moetune.domain.problem import Problem
    from moetune.servers.protocol import Server


@runtime_checkable
class OtherKernelServer(Protocol):
    """What a server adds that runs another kernel where few tokens come. Most leave it out."""

    def cuda_kernel_until(self, problem: Problem) -> int:
        """The last m at which the other kernel runs, as at every m below it; 0 where it never does."""
        ...

    def cuda_kernel_entry(self, problem: Problem, m: int) -> KernelConfig:
        """The entry with which the other kernel does at such an m what it does without a file."""
        ...

    def cuda_kernel_fault(self, problem: Problem, m: int, config: KernelConfig) -> str:
        """Why the other kernel cannot run the entry of a key; empty where it can."""
        ...


def cuda_kernel_until(server: Server, problem: Problem) -> int:
    """The last m at which another kernel than Triton's runs; 0 where there is none."""
    return server.cuda_kernel_until(problem) if isinstance(server, OtherKernelServer) else 0


def cuda_kernel_fault(server: Server, problem: Problem, m: int, config: KernelConfig) -> str:
    """Why the other kernel cannot run the entry of a key; empty where it can, and where there is none."""
    if not isinstance(server, OtherKernelServer) or not server.cuda_kernel_until(problem):
        return ""
    return server.cuda_kernel_fault(problem, m, config)


def cuda_kernel_text(server: Server, problem: Problem) -> str:
    """Which m those are, in words; empty where there are none."""
    last = cuda_kernel_until(server, problem)
    ms = "m = 1" if last == 1 else f"m = 1 to {last}"
    return f"{ms}: {server.name} {server.version} runs a CUDA kernel of its own there" if last else ""


def own_entries(server: Server, problem: Problem) -> tuple[tuple[int, KernelConfig], ...]:
    """The entries for such m: at both ends of each BLOCK_SIZE_M, and at powers of two between."""
    if not isinstance(server, OtherKernelServer):
        return ()
    entries = [
        (m, server.cuda_kernel_entry(problem, m)) for m in range(1, server.cuda_kernel_until(problem) + 1)
    ]
    sizes = [None, *(config.block_size_m for _, config in entries), None]
    return tuple(
        (m, config)
        for m, config in entries
        if sizes[m] != sizes[m - 1] or sizes[m] != sizes[m + 1] or m & (m - 1) == 0
    )


def with_own_entries(server: Server, problem: Problem, table: ConfigTable) -> ConfigTable:
    """A table whose entries at such m are the server's own; where there are none it stays as it is."""
    last = cuda_kernel_until(server, problem)
    if not last:
        return table
    chosen = [entry for entry in table.entries if entry[0] > last]
    return ConfigTable.of([*own_entries(server, problem), *chosen])
