"""The files of published wheels that hold the servers' kernels, put where a test wants them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetune.applications.server_kernels import kernel_in
from moetune.servers.protocol import KernelServer
from moetune.servers.registry import open_server
from tests.wheels import members, read_member

if TYPE_CHECKING:
    from pathlib import Path

    from moetune.domain.server_kernel import KernelFile

RELEASES = (
    *(("sglang", f"0.{rest}") for rest in ("4.9", "5.1", "5.2", "5.3", "5.4", "5.5", "5.6", "5.9", "5.10")),
    *(("sglang", f"0.5.{rest}") for rest in (11, 12, 13, 14, 15, 16, 18, 20, 23)),
    *(("vllm", f"0.{rest}") for rest in ("10.2", "11.0", "11.1", "12.0", "13.0", "20.0", "27.1", "33.0")),
)
"""Every release whose kernels were read."""


def home_of(package: str, version: str) -> str:
    """The file of a wheel that its release keeps its kernels in."""
    server = open_server(package, version)
    assert isinstance(server, KernelServer)
    return server.kernel_files()[0]


def kernel_file(package: str, version: str, folder: Path) -> KernelFile:
    """Unpack the file that holds the kernels."""
    name = home_of(package, version)
    assert name in members(package, version)
    path = folder / name
    path.parent.mkdir(parents=True)
    path.write_bytes(read_member(package, version, name).encode())
    return kernel_in(open_server(package, version), folder)
