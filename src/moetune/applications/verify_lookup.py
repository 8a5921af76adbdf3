"""What can be said of config files without a GPU: the server's own lookup, its loader, lint, the picks."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.applications.config_files import read_config
from moetune.applications.environment import (
    SERVERS,
    Installed,
    config_trees,
    find_installed,
    read_tree,
    shipped_tree,
)
from moetune.applications.file_meaning import (
    Meaning,
    Sizes,
    gpu_of,
    guess_server,
    meaning_of,
    root_of,
    why_never_read,
)
from moetune.applications.install_target import Source, home_of
from moetune.applications.lint import lint
from moetune.applications.lint_report import LintRequest
from moetune.applications.lint_tree import is_nested
from moetune.applications.planning import open_asked
from moetune.applications.request import DEFAULT_OUT, Request
from moetune.applications.routing_store import UNIFORM, named_routing
from moetune.applications.verify_answer import Looked, VerifiedFile, VerifyRequest
from moetune.applications.verify_picks import picks_of
from moetune.domain.config import ConfigTable
from moetune.domain.errors import ConfigFileError, InputError, MoetuneError
from moetune.domain.file_names import FileName, parse_file_name
from moetune.domain.problem import Kernel, Parallelism, Problem
from moetune.domain.text import printable
from moetune.servers.other_kernel import cuda_kernel_text
from moetune.servers.protocol import ConfigTree, Lookup, Outcome, Server, ServerOptions

if TYPE_CHECKING:
    from moetune.domain.gpu import Gpu
    from moetune.domain.model import ExpertLayer

_SAYS = {
    Outcome.EXACT: "the server's own lookup finds it",
    Outcome.STALE: "the server finds it, with a warning: it lies in the directory of another Triton version",
    Outcome.REUSED_UP: "never read: the server takes the up kernel's file for both kernels, {found}",
    Outcome.DEFAULT: "never read: the server finds no file and takes its default; it looks for {first}",
    Outcome.IGNORED: "never read: in this mode the server opens no file",
    Outcome.CRASH: "never read: the server dies of {error} while it looks for it",
}
_INSTEAD = "never read: the server takes {found}"
_DIRECTORY = "moe-configs"  # the directory of examples: see docs/deploy.md


@dataclass(frozen=True, slots=True)
class FilePair:
    """The files of one problem that were named: one, or an up file and its `_down` file."""

    up: Source | None = None
    down: Source | None = None

    @property
    def sources(self) -> tuple[Source, ...]:
        """Those that are there, up first."""
        return tuple(source for source in (self.up, self.down) if source is not None)


def pairs_of(sources: Sequence[Source]) -> tuple[FilePair, ...]:
    """Put the `_down` file of a problem to its up file; the others stand alone."""
    pairs: dict[tuple[Path, str], FilePair] = {}
    for source in sources:
        name = parse_file_name(source.path.name)
        is_down = name is not None and name.down
        shape = source.path.name if name is None else str(replace(name, down=False))
        key = (source.path.parent, shape)
        found = pairs.get(key, FilePair())
        pairs[key] = replace(found, down=source) if is_down else replace(found, up=source)
    return tuple(pairs.values())


def look_up(
    request: VerifyRequest, pair: FilePair, environ: Mapping[str, str], layer: ExpertLayer | None
) -> Looked:
    """Everything about a pair of files that needs no GPU.

    Raises:
        MoetuneError: for a server that is not known, or a model that these files are not for.
    """
    return _Looking(request, pair, environ, layer).run()


class _Looking:
    """One pair on its way through the server's lookup."""

    def __init__(
        self,
        request: VerifyRequest,
        pair: FilePair,
        environ: Mapping[str, str],
        layer: ExpertLayer | None,
    ) -> None:
        self._request, self._pair, self._environ, self._layer = request, pair, environ, layer
        self._server, self._installed, self._assumed = _server_of(request, pair)
        self._options = ServerOptions(deterministic=request.deterministic, environment=dict(environ))
        first = pair.sources[0].path
        self._name = parse_file_name(first.name)
        self._folder = first.parent
        self._nested = is_nested(self._server)
        self._root = _shown_root(first) if self._nested else first.parent

    def run(self) -> Looked:
        server = self._server
        known, known_from = self._meaning()
        problem = None if known is None else replace(known.problem, routing=self._routing())
        trees = self._trees()
        files: list[VerifiedFile] = []
        tables: dict[Kernel, ConfigTable | None] = {"up": None, "down": None}
        kernels: tuple[tuple[Kernel, Source | None], ...] = (("up", self._pair.up), ("down", self._pair.down))
        for kernel, source in kernels:
            lookup = self._lookup(problem, kernel, trees)
            if source is not None:
                files.append(self._file(source, kernel, problem, lookup))
                tables[kernel] = self._table(source.path.name, source.content, problem)
            elif lookup is not None and lookup.found and lookup.outcome is not Outcome.REUSED_UP:
                if kernel == "down" and not server.separate_down_file:
                    continue
                along = self._loaded_along(kernel, lookup, problem)
                if along is not None:
                    files.append(along[0])
                    tables[kernel] = along[1]
        up = _or_default(tables["up"])
        separate = server.separate_down_file and tables["down"] is not None
        down = _or_default(tables["down"]) if separate else up
        usable = problem is not None and not any(file.unreadable for file in files) and (up or down)
        other = "" if known is None or not known.complete else cuda_kernel_text(server, known.problem)
        return Looked(
            server=server,
            assumed=self._assumed,
            problem=problem,
            complete=known is not None and known.complete,
            known_from=known_from,
            note="" if known is None else known.note,
            other_kernel=other,
            files=tuple(files),
            findings=lint(self._lint_request(), self._environ).findings,
            tables=(up, down),
            picks=picks_of(server, problem, up, down, self._request)
            if problem is not None and usable
            else (),
        )

    # what the files are for

    def _meaning(self) -> tuple[Meaning | None, str]:
        name = self._name
        if name is None:
            return None, ""
        gpu = gpu_of(name.device, self._request.compute_capability)[0]
        if self._layer is not None and (self._request.tp or self._request.ep):
            return Meaning(self._sharded(self._layer, name, gpu), True), "the model"
        sizes = Sizes(self._layer, self._request.hidden, self._request.topk)
        given = meaning_of(self._server, name, gpu, sizes)
        if given is None or given.complete:
            return given, "" if given is None else "the model" if self._layer else "--hidden and --topk"
        recorded = self._recorded(gpu)
        if recorded is not None and self._layer is None:
            return Meaning(recorded, True), "the provenance beside it"
        return given, ""

    def _routing(self) -> str:
        """The routing that the files were tuned for, as far as their provenance tells it."""
        recorded = (source.recorded for source in self._pair.sources if source.recorded is not None)
        names = (one.problem.routing for one in recorded if one.problem is not None)
        return named_routing(next(names, UNIFORM))

    def _sharded(self, layer: ExpertLayer, name: FileName, gpu: Gpu) -> Problem:
        """The model's problem when it is split as was said, which must be the file's."""
        split = Parallelism(tp=self._request.tp or 1, ep=self._request.ep or 1)
        problem = self._server.problem(layer, split, gpu, self._options)
        wanted = self._server.file_name(problem, "up")
        if wanted != str(replace(name, down=False)):
            raise InputError(
                f"with tp {split.tp} and ep {split.ep} {self._server.name} {self._server.version} looks for "
                f"{wanted}, not for {printable(str(name), 300)}",
                "leave --tp and --ep out where the file's E and N are right",
            )
        return problem

    def _recorded(self, gpu: Gpu) -> Problem | None:
        """The problem that the provenance beside a file tells, where it is of that file."""
        for source in self._pair.sources:
            recorded = source.recorded
            if recorded is None or recorded.problem is None:
                continue
            problem = replace(
                recorded.problem,
                gpu=gpu,
                server=self._server.name,
                server_version=self._server.version,
                triton_version=self._server.triton_version,
            )
            sizes = (problem.E, problem.global_experts, problem.topk, problem.K, problem.N, problem.ep)
            if min(sizes) < 1 or max(sizes) >= 1 << 24:
                continue
            try:
                spelled = {self._server.file_name(problem, kernel) for kernel in ("up", "down")}
            except MoetuneError:
                continue
            if source.path.name in spelled:
                return problem
        return None

    # the lookup

    def _trees(self) -> tuple[ConfigTree, ...]:
        """The trees that the server reads when it is pointed to where the files lie."""
        if self._root is None:
            return ()
        if self._server.directory_variable is None and not self._is_home(self._root):
            return ()
        mine = read_tree(self._root, nested=self._nested)
        shipped = shipped_tree(self._server, self._installed)
        return (mine,) if shipped is None else (mine, shipped)

    def _is_home(self, root: Path) -> bool:
        home = home_of(self._server)
        return home is not None and root.absolute().as_posix().endswith(f"/{home}")

    def _lookup(self, problem: Problem | None, kernel: Kernel, trees: Sequence[ConfigTree]) -> Lookup | None:
        if problem is None or not trees:
            return None
        try:
            return self._server.lookup(problem, kernel, trees, self._options)
        except MoetuneError:
            return None

    def _expected(self, path: Path) -> str:
        """The path as the lookup spells it when it ends with that file."""
        root = str(self._root).rstrip("/")
        return f"{root}/configs/{path.parent.name}/{path.name}" if self._nested else f"{root}/{path.name}"

    def _file(
        self,
        source: Source,
        kernel: Kernel,
        problem: Problem | None,
        lookup: Lookup | None,
    ) -> VerifiedFile:
        path = source.path
        never = why_never_read(self._server, path.name)
        says, reads = self._says(path, problem, kernel, lookup, never)
        use, elsewhere = self._use(path, problem, kernel) if reads else ("", "")
        notes = (elsewhere, source.note.replace("left out: ", "provenance: ", 1))
        return VerifiedFile(
            path=str(path),
            kernel=kernel,
            named=True,
            lookup=None if never else lookup,
            reads=reads,
            says=says,
            unreadable=self._unreadable(path.name, source.content, problem),
            mend="" if reads or self._request.deterministic else self._mend(path, bool(never)),
            use=use,
            note="; ".join(filter(None, notes)),
        )

    def _says(
        self, path: Path, problem: Problem | None, kernel: Kernel, lookup: Lookup | None, never: str
    ) -> tuple[str, bool]:
        if never:
            return f"never read: {never}", False
        if lookup is None:
            return f"never read: {self._why_out_of_place(problem, kernel)}", False
        reads = lookup.found is not None and _same(lookup.found, self._expected(path))
        text = _INSTEAD if lookup.found and not reads else _SAYS[lookup.outcome]
        if lookup.outcome is Outcome.REUSED_UP and not reads:
            text = _SAYS[Outcome.REUSED_UP]
        first = lookup.candidates[0] if lookup.candidates else lookup.file_name
        return text.format(found=lookup.found, first=first, error=lookup.error), reads

    def _why_out_of_place(self, problem: Problem | None, kernel: Kernel) -> str:
        server = self._server
        if problem is None:
            return f"{server.name} has no such file name"
        place = server.file_path(problem, kernel)
        if server.directory_variable is None:
            home = home_of(server) or "its own folder"
            return f"{server.name} {server.version} reads no other directory than its own: {home}/{place}"
        return f"{server.name} looks for {place} below {server.directory_variable} or its own folder"

    def _mend(self, path: Path, never: bool) -> str:
        server = self._server
        release = ("--server", server.name, "--server-version", server.version)
        if never:
            gpu = gpu_of(self._name.device)[0].torch_name if self._name is not None else ""
            words = ("moetune", "borrow", str(path), *release, *(("--gpu", gpu) if gpu else ()))
            return shlex.join([*words, "--out", DEFAULT_OUT])
        if self._installed is not None:
            return shlex.join(["moetune", "install", str(path)])
        root = _DIRECTORY if self._root is None else f"{self._root}"
        return shlex.join(["moetune", "install", str(path), "--root", root, *release])

    def _use(self, path: Path, problem: Problem | None, kernel: Kernel) -> tuple[str, str]:
        """What makes the server read the directory of a file, and what it reads as things are set here.

        Both are empty where it reads that directory already, or no variable can name it.
        """
        server, variable = self._server, self._server.directory_variable
        if variable is None or problem is None:
            return "", ""
        root = self._root or path.parent
        command = f"export {variable}={shlex.quote(str(root.absolute()))}"
        if variable not in self._environ and self._installed is None:
            return command, ""
        try:
            here = config_trees(server, self._environ, self._installed)
        except MoetuneError as error:
            return command, f"as things are set here: {error.message}"
        if not here:
            return command, ""
        if os.path.realpath(here[0].root) == os.path.realpath(root):
            return "", ""
        found = server.lookup(problem, kernel, here, self._options).found or "its default"
        return command, f"as things are set here the server takes {found}"

    # the loader

    def _unreadable(self, name: str, content: bytes, problem: Problem | None) -> str:
        try:
            self._server.read_table(content.decode(), name, problem)
        except ConfigFileError as error:
            return error.message
        except UnicodeDecodeError:
            return "the server dies of UnicodeDecodeError"
        return ""

    def _table(self, name: str, content: bytes, problem: Problem | None) -> ConfigTable | None:
        if self._unreadable(name, content, problem):
            return None
        return self._server.read_table(content.decode(), name, problem)

    def _loaded_along(
        self, kernel: Kernel, lookup: Lookup, problem: Problem | None
    ) -> tuple[VerifiedFile, ConfigTable | None] | None:
        """The other file of the problem, which the server reads along with the one that was named."""
        assert lookup.found is not None
        path = Path(lookup.found)
        content = read_config(path)
        if not isinstance(content, bytes):
            return None
        file = VerifiedFile(
            path=lookup.found,
            kernel=kernel,
            named=False,
            lookup=lookup,
            reads=True,
            says=f"the server reads it for the {kernel} kernel beside the file that was named",
            unreadable=self._unreadable(path.name, content, problem),
        )
        return file, self._table(path.name, content, problem)

    def _lint_request(self) -> LintRequest:
        server = self._server
        return LintRequest(
            paths=tuple(source.path for source in self._pair.sources),
            server=server.name,
            server_version=server.version,
            triton_version=server.triton_version,
            compute_capability=self._request.compute_capability,
            max_m=self._request.max_m,
            offline=True,
        )


def _or_default(table: ConfigTable | None) -> ConfigTable | None:
    """A file without entries is none: the server takes its default."""
    return table if table is not None and table.entries else None


def _same(found: str, expected: str) -> bool:
    return os.path.normpath(found) == os.path.normpath(expected)


def _shown_root(path: Path) -> Path | None:
    """The root of the tree that a file lies in, as a person wrote it where that is possible."""
    root = root_of(path)
    return path.parents[2] if root is not None and len(path.parents) > 2 else root


def _server_of(request: VerifyRequest, pair: FilePair) -> tuple[Server, Installed | None, tuple[str, ...]]:
    """The release that reads a pair: what was said, else what is installed, else what the files say."""
    sources = pair.sources
    recorded = next((one.recorded.identity for one in sources if one.recorded is not None), {})
    said = {name: text for name, text in recorded.items() if isinstance(text, str)}
    assumed: list[str] = []
    name = request.server or said.get("server")
    if name is None:
        guess = guess_server([one.path for one in sources], {one.path: one.content for one in sources})
        if guess is not None:
            name = guess[0]
            assumed.append(f"--server {guess[0]}: {guess[1]}")
    key = "" if name is None else name.strip().lower()
    version, triton = request.server_version, request.triton_version
    is_here = key in SERVERS and find_installed(key) is not None
    if version is None and not is_here and said.get("server") == key and "server_version" in said:
        version = said["server_version"]
        assumed.append(f"--server-version {printable(version, 40)}: from the files' provenance")
    if triton is None and not is_here and said.get("server_version") == version and version is not None:
        triton = said.get("triton_version")
    server, installed, more = open_asked(Request(server=name, server_version=version, triton_version=triton))
    return server, installed, (*assumed, *more)
