"""Ports of this machine: which are free, and who holds one."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING

from moetune.applications.experiments.processes import PROC, all_processes

if TYPE_CHECKING:
    from collections.abc import Iterable

_LISTENS = "0A"  # state in /proc/net/tcp
_TRIED = 200


def is_free(port: int) -> bool:
    """Whether a server could listen on a port, on any address."""
    try:
        with _bound(port):
            return True
    except OSError:
        return False


def _bound(port: int) -> socket.socket:
    """A socket that listens on all addresses, as a server does: connections that ended do not count."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.bind(("", port))
        held.listen(1)
    except BaseException:
        held.close()
        raise
    return held


def first_free(port: int) -> int | None:
    """The first free port from one on; None when there is none near it."""
    candidates = range(port, min(port + _TRIED, 1 << 16))
    return next((candidate for candidate in candidates if is_free(candidate)), None)


def listens(port: int, limit_s: float = 1.0) -> bool:
    """Whether somebody takes connections on a port of this machine."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), limit_s):
        return True
    return False


def listeners(port: int, among: Iterable[int] | None = None) -> tuple[int, ...]:
    """Ids of the processes that listen on a port, as far as this user may see them.

    Args:
        port: the port.
        among: where to look; None looks at all processes.
    """
    wanted = {f"socket:[{inode}]" for inode in _inodes(port)}
    if not wanted:
        return ()
    return tuple(pid for pid in (all_processes() if among is None else among) if wanted & _open_files(pid))


def _inodes(port: int) -> set[str]:
    found = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (PROC / "net" / name).read_text("ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(fields[9])
    return found


def _open_files(pid: int) -> set[str]:
    folder = PROC / str(pid) / "fd"
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):  # noqa: PTH208 - many processes with many files
            with contextlib.suppress(OSError):
                found.add(os.readlink(folder / name))  # noqa: PTH115
    return found
