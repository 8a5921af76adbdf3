"""Judges a tree of config files: what the server's own lookup makes of its directories and pairs."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moetune.applications.lint_findings import Judged, finding, key_list
from moetune.domain.file_names import parse_file_name
from moetune.domain.gpu import Gpu
from moetune.domain.problem import Problem
from moetune.domain.rules import find
from moetune.servers.protocol import ConfigTree, Outcome, ServerOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moetune.domain.findings import Finding
    from moetune.servers.protocol import Server

_LISTED = 40


@dataclass(frozen=True, slots=True)
class Order:
    """How a server goes through a tree.

    Attributes:
        directories: those that it tries for every name, the running Triton's first.
        error: the exception that a name ends with which the first lacks; empty as a rule.
    """

    directories: tuple[str, ...]
    error: str = ""


def order_of(server: Server, tree: ConfigTree) -> Order:
    """Ask the server's lookup in which directories it looks, by a name that nobody has."""
    problem = _nobody(server)
    lookup = server.lookup(problem, "up", (tree,), ServerOptions())
    folders = (path.removeprefix(f"{tree.root}/").rpartition("/")[0] for path in lookup.candidates)
    directories = tuple(dict.fromkeys(folder.removeprefix("configs/") for folder in folders))
    return Order(directories, (lookup.error or "") if lookup.outcome is Outcome.CRASH else "")


def is_nested(server: Server) -> bool:
    """Whether the server keeps files in directories by Triton version."""
    return "/" in server.file_path(_nobody(server), "up")


def _nobody(server: Server) -> Problem:
    gpu = Gpu("NVIDIA nobody", compute_capability=(9, 0), smem_optin_bytes=232_448)
    return Problem(
        E=1,
        global_experts=1,
        topk=1,
        K=1,
        N=1,
        file_n=1,
        gpu=gpu,
        server=server.name,
        server_version=server.version,
        triton_version=server.triton_version,
    )


def judge_tree(
    server: Server, tree: ConfigTree, judged: Mapping[tuple[str, str], Judged]
) -> Iterator[Finding]:
    """What is wrong with a tree as a whole.

    Args:
        server: the release.
        tree: all that lies there.
        judged: `(directory, file name)` to the files that are asked about.
    """
    if tree.directories is None:
        yield finding("MOE105", f"{tree.root} has no configs/ in it", tree.root)
        return
    order = order_of(server, tree)
    if order.error:
        yield from _unreadable_names(server, tree, order.error)
        readable = {name: names for name, names in tree.directories.items() if _can_list(server, tree, name)}
        order = order_of(server, replace(tree, directories=readable))
    yield from _out_of_place(server, tree, order, judged)
    yield from _stale(server, tree, order, judged)
    yield from _mixed(tree, order, judged)


def _can_list(server: Server, tree: ConfigTree, directory: str) -> bool:
    return not order_of(server, ConfigTree(tree.root, {directory: frozenset()})).error


def _unreadable_names(server: Server, tree: ConfigTree, error: str) -> Iterator[Finding]:
    for name in sorted(tree.directories or ()):
        if not _can_list(server, tree, name):
            where = f"{tree.root}/configs/{name}"
            yield finding(
                "MOE104",
                f"{server.name} {server.version} reads {name!r} as a version and dies of {error} at the "
                "first file that the running Triton's directory lacks",
                where,
                mend=shlex.join(["mv", where, f"{tree.root}/{name}"]),
            )


def _out_of_place(
    server: Server, tree: ConfigTree, order: Order, judged: Mapping[tuple[str, str], Judged]
) -> Iterator[Finding]:
    lost = Counter(directory for directory, _ in judged if directory not in order.directories)
    for directory, count in sorted(lost.items()):
        yield finding(
            "MOE132",
            f"{count} file(s) that {server.name} {server.version} with Triton {server.triton_version} never "
            f"looks for: it tries {', '.join(order.directories[:8])}",
            f"{tree.root}/configs/{directory}",
            facts=[("files", str(count))],
        )


def _stale(
    server: Server, tree: ConfigTree, order: Order, judged: Mapping[tuple[str, str], Judged]
) -> Iterator[Finding]:
    """One finding for all files that come from another Triton's directory."""
    assert tree.directories is not None
    names = sorted({name for directory, name in judged if directory in order.directories})
    found = {name: find(name, tree.directories, order.directories) for name in names}
    stale = {
        name: place.directory or "" for name, place in found.items() if not place.exact and place.directory
    }
    if not stale:
        return
    by_directory = ", ".join(
        f"{count} from {where}" for where, count in sorted(Counter(stale.values()).items())
    )
    devices = Counter(name.device for text in stale if (name := parse_file_name(text)))
    behind = sum(len(place.behind) for place in found.values())
    yield finding(
        "MOE142",
        f"{len(stale)} of {len(names)} files are not for Triton {server.triton_version}: {by_directory}",
        f"{tree.root}/configs",
        facts=[
            ("files", str(len(stale))),
            ("older copies behind", str(behind)),
            ("devices", ", ".join(f"{device} {count}" for device, count in devices.most_common(12))),
            ("names", " | ".join(list(stale)[:_LISTED])),
        ],
        mend=shlex.join(
            [
                *("moetune", "borrow", f"{tree.root}/configs"),
                *("--server", server.name, "--server-version", server.version),
                *("--triton-version", server.triton_version),
            ]
        ),
    )


def _mixed(tree: ConfigTree, order: Order, judged: Mapping[tuple[str, str], Judged]) -> Iterator[Finding]:
    assert tree.directories is not None
    seen: set[str] = set()
    for _, file_name in sorted(judged):
        name = parse_file_name(file_name)
        if name is None or (up := str(replace(name, down=False))) in seen:
            continue
        seen.add(up)
        down = str(replace(name, down=True))
        of_up = find(up, tree.directories, order.directories).directory
        of_down = find(down, tree.directories, order.directories).directory
        if of_up and of_down and of_up != of_down:
            yield finding(
                "MOE143",
                f"the server takes the up file of {of_up} and the _down file of {of_down}",
                f"{tree.root}/configs/{of_up}/{up}",
                facts=[("up", of_up), ("down", of_down)],
            )


def judge_tma(server: Server, up: Judged, where: str) -> Iterator[Finding]:
    """USE_TMA in an up file that has no `_down` file beside it."""
    keys = [m for m, config in up.table.entries if config.use_tma]
    if keys and server.separate_down_file and up.name is not None and not up.name.down:
        yield finding(
            "MOE145",
            f"{key_list(keys)}: USE_TMA is set and there is no _down file: the down kernel keeps it, "
            "although the log says without TMA",
            where,
            keys=keys,
        )
