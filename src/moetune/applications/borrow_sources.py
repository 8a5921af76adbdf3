"""The files that `moetune borrow` borrows from, read and put together in pairs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.applications.borrow_answer import BorrowRequest, PassedOver
from moetune.applications.config_files import TRITON, Unreadable, discover, read_config
from moetune.applications.environment import SERVERS, config_trees, find_installed
from moetune.applications.file_meaning import gpu_of, guess_server
from moetune.applications.lint_file import FileJudge
from moetune.applications.planning import open_asked
from moetune.applications.provenance import Origin
from moetune.applications.request import Request
from moetune.domain.config import ConfigTable
from moetune.domain.errors import InputError
from moetune.domain.file_names import FileName, parse_file_name
from moetune.domain.gpu import Gpu
from moetune.domain.text import printable
from moetune.servers.protocol import Server
from moetune.servers.registry import open_server

if TYPE_CHECKING:
    from collections.abc import Iterator

_UNREAD = frozenset({"MOE101", "MOE102", "MOE103", "MOE108", "MOE134", "MOE135"})


@dataclass(frozen=True, slots=True)
class Source:
    """A file, or a pair, to borrow from.

    Attributes:
        path: of the up file.
        server: whose it is.
        name: the up file's.
        gpu: that it was tuned for.
        directory: of its Triton version; empty where the server has none.
        up: its entries that can be read.
        down: those of the down file beside it; None without.
        origins: the files, with digests.
        notes: what could not be read of them.
        named: a person named the file itself, not a directory of files.
    """

    path: Path
    server: Server
    name: FileName
    gpu: Gpu
    directory: str
    up: ConfigTable
    down: ConfigTable | None
    origins: tuple[Origin, ...]
    notes: tuple[str, ...]
    named: bool


class Lenders:
    """Finds the files to borrow from, and the server to write for.

    Attributes:
        passed: files that are not borrowed, and why.
        assumed: what nobody said and was taken, in words.
    """

    def __init__(self, request: BorrowRequest, environ: Mapping[str, str]) -> None:
        self._request, self._environ = request, environ
        self._readers: dict[str, FileJudge] = {}
        self.passed: list[PassedOver] = []
        self.assumed: list[str] = []

    def files(self) -> dict[Path, str]:
        """Files to borrow from, with the server whose they are where that is certain."""
        request = self._request
        found = dict.fromkeys(discover(request.files).files, request.from_server or "")
        if request.installed:
            roots = list(self._installed_roots())
            for name, root in roots:
                found |= dict.fromkeys(discover([root]).files, name)
            if not roots:
                raise InputError(
                    "no server is installed for this interpreter",
                    "run moetune in the server's environment, or name the directory of its files",
                )
        if not found:
            raise InputError(
                "no config file lies there", "config files are called E=..,N=..,device_name=...json"
            )
        return found

    def _installed_roots(self) -> Iterator[tuple[str, Path]]:
        names = [name for name in (self._request.from_server, self._request.server) if name]
        for name in names[:1] or list(SERVERS):
            package = find_installed(name)
            if package is None:
                continue
            trees = config_trees(open_server(name, package.version), self._environ, package)
            yield from ((name, Path(tree.root)) for tree in trees if tree.directories)

    def target(self, files: Mapping[Path, str]) -> Server:
        """The server to write for: as said, else the one that is installed, else the files' own."""
        request = self._request
        name = request.server
        if name is None:
            here = [server for server in SERVERS if find_installed(server) is not None]
            guess = guess_server(list(files), {})
            whose = next((server for server in files.values() if server), guess[0] if guess else "sglang")
            name = here[0] if len(here) == 1 else whose
            self.assumed.append(
                f"--server {name}: {'installed here' if name in here else 'whose the files are'}"
            )
        server, _, assumed = open_asked(
            Request(server=name, server_version=request.server_version, triton_version=request.triton_version)
        )
        self.assumed += assumed
        return server

    def _reader(self, name: str) -> FileJudge:
        if name not in self._readers:
            # The newest rules read what any release wrote.
            self._readers[name] = FileJudge(open_server(name), max_m=self._request.max_m)
        return self._readers[name]

    def sources(self, files: Mapping[Path, str]) -> Iterator[Source]:
        """Files by pair, the up file first; what is no tuned file of the Triton kernel is passed over."""
        pairs: dict[Path, dict[bool, Path]] = {}
        for path in files:
            name = parse_file_name(path.name)
            if name is None or not name.device or name.backend:
                self.pass_over(path, "its name is not that of a tuned file of this kernel")
                continue
            pairs.setdefault(path.with_name(str(replace(name, down=False))), {})[name.down] = path
        named = set(self._request.files)
        for up_path, members in pairs.items():
            if False not in members and (counterpart := _on_disk(up_path)):
                members[False] = counterpart
            if True not in members and (counterpart := _on_disk(_down_of(up_path))):
                members[True] = counterpart
            if False not in members:
                self.pass_over(members[True], "it is the down file of a pair whose up file is not there")
                continue
            source = self._read(up_path, members, files, named)
            if source is not None:
                yield source

    def _read(
        self, up_path: Path, members: Mapping[bool, Path], files: Mapping[Path, str], named: set[Path]
    ) -> Source | None:
        tables: dict[bool, ConfigTable] = {}
        origins: list[Origin] = []
        notes: list[str] = []
        server: Server | None = None
        for down in (False, True):
            path = members.get(down)
            if path is None:
                continue
            content = read_config(path)
            if isinstance(content, Unreadable):
                self.pass_over(path, content.reason)
                continue
            whose = files.get(path) or files.get(up_path) or self._whose(path, content)
            reader = self._reader(whose)
            server = reader.server
            judged = reader.judge(path.name, path.name, content)
            notes += [
                f"{'down' if down else 'up'} file: {found.message}"
                for found in judged.findings
                if found.code.code in _UNREAD
            ]
            tables[down] = judged.table
            origin = Origin(server.name, path.name, directory_of(path), hashlib.sha256(content).hexdigest())
            origins.append(origin)
        if not tables.get(False) or server is None:
            why = "; ".join(notes) or "it has no entries that can be read"
            self.pass_over(up_path, why)
            return None
        name = parse_file_name(up_path.name)
        assert name is not None
        return Source(
            path=up_path,
            server=server,
            name=name,
            gpu=gpu_of(name.device)[0],
            directory=directory_of(up_path),
            up=tables[False],
            down=tables.get(True) or None,
            origins=tuple(origins),
            notes=tuple(notes),
            named=any(path in named for path in members.values()),
        )

    def _whose(self, path: Path, content: bytes) -> str:
        guess = guess_server([path], {path: content})
        if guess is None:
            self.assumed.append("--from-server sglang: nothing says whose the files are")
            return "sglang"
        return guess[0]

    def pass_over(self, path: Path, reason: str) -> None:
        """Note why a file is not borrowed."""
        self.passed.append(PassedOver(path, printable(reason, 400)))


def directory_of(path: Path) -> str:
    """Directory of a Triton version that a file lies in; empty without."""
    return path.parent.name if path.parent.name.startswith(TRITON) else ""


def _on_disk(path: Path) -> Path | None:
    return path if path.is_file() else None


def _down_of(up_path: Path) -> Path:
    name = parse_file_name(up_path.name)
    assert name is not None
    return up_path.with_name(str(replace(name, down=True)))
