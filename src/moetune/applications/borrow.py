"""`moetune borrow`: files of another GPU, server or Triton version, made safe and labelled unmeasured."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetune import __version__
from moetune.applications.borrow_tables import Action, Borrower, Borrowing, Change
from moetune.applications.config_files import Unreadable, discover, read_config
from moetune.applications.environment import config_trees, find_installed
from moetune.applications.file_meaning import Meaning, Sizes, gpu_of, guess_server, meaning_of, packing
from moetune.applications.lint import LintRequest, sizes_of
from moetune.applications.lint_file import FileJudge
from moetune.applications.output import TableFile, Written, write_tables
from moetune.applications.planning import open_asked
from moetune.applications.provenance import Borrowed, BorrowedEntry, Check, Origin
from moetune.applications.request import DEFAULT_MAX_M, DEFAULT_OUT, Request
from moetune.domain.config import ConfigTable
from moetune.domain.errors import ConfigFileError, InputError, MoetuneError
from moetune.domain.file_names import FileName, parse_file_name
from moetune.domain.gpu import Gpu, find_gpu
from moetune.domain.gpu_siblings import siblings
from moetune.domain.problem import KERNELS, Parallelism
from moetune.domain.space import dtype_violation
from moetune.domain.text import printable
from moetune.servers.protocol import Server, ServerOptions
from moetune.servers.registry import open_server

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from moetune.domain.predict import PerformanceModel
    from moetune.domain.problem import Kernel, Problem

SCHEMA = "moetune.borrow/1"
_UNLIKE = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BorrowRequest:
    """What to borrow, and for whom.

    Attributes:
        paths: config files and directories of them.
        installed: also the files of the server that is installed here.
        from_server: whose files they are; None: by their names and places.
        server: the target; None: the installed one, else the files' own.
        server_version: its release; None: the installed one, else the newest known.
        triton_version: its Triton; None: the installed one, else what that release pins.
        gpu: names of the target's GPUs; empty: each file for the GPU of its own name.
        compute_capability: of a GPU that the registry does not know.
        max_m: the largest m that the server can meet.
        model: a checkpoint, whose K and topk let entries be repaired.
        hidden: K by hand.
        topk: by hand.
        offline: never ask the network.
        out: the directory below which the files go.
        force: replace files of another problem or another origin.
    """

    paths: tuple[Path, ...] = ()
    installed: bool = False
    from_server: str | None = None
    server: str | None = None
    server_version: str | None = None
    triton_version: str | None = None
    gpu: tuple[str, ...] = ()
    compute_capability: str | None = None
    max_m: int = DEFAULT_MAX_M
    model: str | None = None
    hidden: int | None = None
    topk: int | None = None
    offline: bool = False
    out: str | Path = DEFAULT_OUT
    force: bool = False


@dataclass(frozen=True, slots=True)
class Lent:
    """Files that were made from one file, or one pair of them.

    Attributes:
        source: the file that was borrowed, the up file of a pair.
        gpu: the target's.
        from_gpu: that the source was tuned for.
        kinship: what the two GPUs share, with the confidence; empty where they are the same.
        files: as they now stand; of one table there is one.
        changes: every entry.
        notes: what a person should know.
        predicted: the performance model chose among repairs and fillings.
    """

    source: Path
    gpu: str
    from_gpu: str
    kinship: str
    files: tuple[Written, ...]
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    predicted: bool

    def counts(self) -> dict[str, int]:
        """How many entries became what."""
        counted = Counter(change.action.value for change in self.changes)
        return {action.value: counted[action.value] for action in Action if counted[action.value]}


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A file that was not borrowed, and why."""

    source: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Borrow:
    """The answer to `moetune borrow`.

    Attributes:
        server: the target: name, version, Triton.
        out: the directory below which files were written.
        lent: what was written, by path.
        passed_over: what was not, and why.
        assumed: what nobody said and was taken, in words.
        use_command: what makes the server read the files.
    """

    server: tuple[str, str, str]
    out: Path
    lent: tuple[Lent, ...]
    passed_over: tuple[PassedOver, ...]
    assumed: tuple[str, ...]
    use_command: str

    def to_json(self) -> dict[str, Any]:
        """The document of `moetune borrow --json`."""
        name, version, triton = self.server
        return {
            "schema": SCHEMA,
            "moetune": __version__,
            "kind": "borrowed",
            "verified": False,
            "server": {"name": name, "version": version, "triton_version": triton},
            "out": str(self.out),
            "lent": [_lent_json(lent) for lent in self.lent],
            "passed_over": [
                {"source": str(passed.source), "reason": passed.reason} for passed in self.passed_over
            ],
            "assumed": list(self.assumed),
            "use_command": self.use_command,
        }


def _lent_json(lent: Lent) -> dict[str, Any]:
    return {
        "source": str(lent.source),
        "gpu": lent.gpu,
        "from_gpu": lent.from_gpu,
        "kinship": lent.kinship,
        "files": [
            {"path": str(file.path), "provenance": str(file.provenance), "state": file.state.value}
            for file in lent.files
        ],
        "counts": lent.counts(),
        "repaired_by_model": lent.predicted,
        "notes": list(lent.notes),
        "changes": [
            {
                "m": change.m,
                "kernel": change.kernel,
                "action": change.action.value,
                "before": None if change.before is None else change.before.to_json(),
                "after": None if change.after is None else change.after.to_json(),
                "why": change.why,
            }
            for change in lent.changes
        ],
    }


def borrow(
    request: BorrowRequest,
    environ: Mapping[str, str] | None = None,
    model: PerformanceModel | None = None,
) -> Borrow:
    """Make files safe for a target and write them: all of them, or on an error none.

    Args:
        request: what is asked.
        environ: the variables of the server; None takes those of this process.
        model: the performance model; None takes the packaged one.

    Raises:
        MoetuneError: for what cannot be done; nothing was then written.
    """
    return _Borrowing(request, os.environ if environ is None else environ, model).run()


@dataclass(frozen=True, slots=True)
class _Source:
    """A file, or a pair, to borrow from."""

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


@dataclass(frozen=True, slots=True)
class _Offer:
    """A source for one target."""

    source: _Source
    meaning: Meaning
    kinship: str
    rank: tuple[int, tuple[int, ...], str]
    notes: tuple[str, ...]


class _Borrowing:
    def __init__(
        self, request: BorrowRequest, environ: Mapping[str, str], model: PerformanceModel | None
    ) -> None:
        self._request, self._environ, self._model = request, environ, model
        self._sizes = sizes_of(
            LintRequest(
                model=request.model, hidden=request.hidden, topk=request.topk, offline=request.offline
            )
        )
        self._gpus = tuple(
            find_gpu(name, compute_capability=request.compute_capability) for name in request.gpu
        )
        self._assumed: list[str] = []
        self._passed: list[PassedOver] = []
        self._readers: dict[str, FileJudge] = {}

    def run(self) -> Borrow:
        request = self._request
        if not request.paths and not request.installed:
            raise InputError(
                "nothing is named to borrow from", "name config files or directories, or add --installed"
            )
        files = self._files()
        server = self._target(files)
        self._judge = FileJudge(server, max_m=request.max_m, sizes=self._sizes)
        offers: dict[str, list[_Offer]] = {}
        for source in self._sources(files):
            for gpu in self._gpus or (source.gpu,):
                offer = self._offer(server, source, gpu)
                if offer is not None:
                    path = server.file_path(offer.meaning.problem, "up")
                    offers.setdefault(path, []).append(offer)
        made = [self._make(server, self._best(path, members)) for path, members in sorted(offers.items())]
        wanted = [one for one in made if one is not None]
        tables = [table for _, _, files_of in wanted for table in files_of]
        written = write_tables(tables, Path(request.out), force=request.force) if tables else ()
        by_path = {str(file.path): file for file in written}
        lent = tuple(
            self._lent(offer, borrowing, [by_path[str(Path(request.out) / table.path)] for table in files_of])
            for offer, borrowing, files_of in wanted
        )
        return Borrow(
            server=(server.name, server.version, server.triton_version),
            out=Path(request.out),
            lent=lent,
            passed_over=tuple(sorted(self._passed, key=lambda one: (str(one.source), one.reason))),
            assumed=tuple(dict.fromkeys(self._assumed)),
            use_command=_use_command(server, Path(request.out)) if written else "",
        )

    # what to borrow from

    def _files(self) -> dict[Path, str]:
        """Files to borrow from, with the server whose they are where that is certain."""
        request = self._request
        found = dict.fromkeys(discover(request.paths).files, request.from_server or "")
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
        for name in names[:1] or ["sglang", "vllm"]:
            package = find_installed(name)
            if package is None:
                continue
            trees = config_trees(open_server(name, package.version), self._environ, package)
            yield from ((name, Path(tree.root)) for tree in trees if tree.directories)

    def _target(self, files: Mapping[Path, str]) -> Server:
        """The server to write for: as said, else the one that is installed, else the files' own."""
        request = self._request
        name = request.server
        if name is None:
            here = [server for server in ("sglang", "vllm") if find_installed(server) is not None]
            guess = guess_server(list(files), {})
            whose = next((server for server in files.values() if server), guess[0] if guess else "sglang")
            name = here[0] if len(here) == 1 else whose
            self._assumed.append(
                f"--server {name}: {'installed here' if name in here else 'whose the files are'}"
            )
        server, _, assumed = open_asked(
            Request(server=name, server_version=request.server_version, triton_version=request.triton_version)
        )
        self._assumed += assumed
        return server

    def _reader(self, name: str) -> FileJudge:
        if name not in self._readers:
            # The newest rules read what any release wrote.
            self._readers[name] = FileJudge(open_server(name), max_m=self._request.max_m)
        return self._readers[name]

    def _sources(self, files: Mapping[Path, str]) -> Iterator[_Source]:
        """Files by pair, the up file first; what is no tuned file of the Triton kernel is passed over."""
        pairs: dict[Path, dict[bool, Path]] = {}
        for path in files:
            name = parse_file_name(path.name)
            if name is None or not name.device or name.backend:
                self._pass(path, "its name is not that of a tuned file of this kernel")
                continue
            pairs.setdefault(path.with_name(str(replace(name, down=False))), {})[name.down] = path
        named = set(self._request.paths)
        for up_path, members in pairs.items():
            if False not in members and (counterpart := self._on_disk(up_path)):
                members[False] = counterpart
            if True not in members and (counterpart := self._on_disk(_down_of(up_path))):
                members[True] = counterpart
            if False not in members:
                self._pass(members[True], "it is the down file of a pair whose up file is not there")
                continue
            source = self._read(up_path, members, files, named)
            if source is not None:
                yield source

    def _on_disk(self, path: Path) -> Path | None:
        return path if path.is_file() else None

    def _read(
        self, up_path: Path, members: Mapping[bool, Path], files: Mapping[Path, str], named: set[Path]
    ) -> _Source | None:
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
                self._pass(path, content.reason)
                continue
            whose = files.get(path) or files.get(up_path) or self._whose(path, content)
            reader = self._reader(whose)
            server = reader.server
            judged = reader.judge(path.name, path.name, content)
            notes += [
                f"{'down' if down else 'up'} file: {found.message}"
                for found in judged.findings
                if found.code.code in ("MOE101", "MOE102", "MOE103", "MOE108", "MOE134", "MOE135")
            ]
            tables[down] = judged.table
            origin = Origin(server.name, path.name, _directory(path), hashlib.sha256(content).hexdigest())
            origins.append(origin)
        if not tables.get(False) or server is None:
            why = "; ".join(notes) or "it has no entries that can be read"
            self._pass(up_path, why)
            return None
        name = parse_file_name(up_path.name)
        assert name is not None
        return _Source(
            path=up_path,
            server=server,
            name=name,
            gpu=gpu_of(name.device)[0],
            directory=_directory(up_path),
            up=tables[False],
            down=tables.get(True) or None,
            origins=tuple(origins),
            notes=tuple(notes),
            named=any(path in named for path in members.values()),
        )

    def _whose(self, path: Path, content: bytes) -> str:
        guess = guess_server([path], {path: content})
        if guess is None:
            self._assumed.append("--from-server sglang: nothing says whose the files are")
            return "sglang"
        return guess[0]

    def _pass(self, path: Path, reason: str) -> None:
        self._passed.append(PassedOver(path, printable(reason, 400)))

    # for which target

    def _offer(self, server: Server, source: _Source, gpu: Gpu) -> _Offer | None:
        if gpu.compute_capability is None and gpu.gfx is None:
            self._pass(source.path, f"what a kernel can ask for on {gpu.torch_name} is not known")
            return None
        kin = self._kinship(source, gpu)
        if kin is None:
            return None
        translated = self._translate(server, source, gpu)
        if translated is None:
            return None
        meaning, notes = translated
        violation = dtype_violation(meaning.problem.quantization.dtype, gpu)
        if violation is not None:
            self._pass(source.path, violation.text)
            return None
        rank, kinship = kin
        newest = tuple(-number for number in _numbers(source.directory))
        return _Offer(source, meaning, kinship, (rank, newest, str(source.path)), notes)

    def _kinship(self, source: _Source, gpu: Gpu) -> tuple[int, str] | None:
        if source.gpu.torch_name == gpu.torch_name:
            return 0, ""
        for place, sibling in enumerate(siblings(gpu), start=1):
            if sibling.gpu.torch_name == source.gpu.torch_name:
                return place, f"{sibling.reason} (confidence {sibling.confidence})"
        if source.named:
            return _UNLIKE, f"{source.gpu.torch_name} is no sibling of {gpu.torch_name}: expect little"
        self._pass(source.path, f"{source.gpu.torch_name} is no sibling of {gpu.torch_name}")
        return None

    def _translate(self, server: Server, source: _Source, gpu: Gpu) -> tuple[Meaning, tuple[str, ...]] | None:
        """The problem of a source on the target: other names, other ways to count."""
        there = meaning_of(source.server, source.name, gpu, Sizes())
        if there is None:
            self._pass(source.path, f"no server has a dtype tag {source.name.dtype!r}")
            return None
        notes = []
        quantization = there.problem.quantization
        E = self._experts(server, source, gpu)
        if source.name.E != E:
            notes.append(
                f"E {source.name.E} becomes {E}: {server.name} counts fused shared experts otherwise"
            )
        tag = "" if quantization.dtype.value == "bf16" else source.name.dtype or quantization.dtype.value
        file_n = max(1, there.problem.N // packing(server, quantization.dtype))
        name = replace(source.name, E=E, N=file_n, dtype=tag)
        try:
            meaning = meaning_of(server, name, gpu, self._sizes)
            assert meaning is not None
            server.file_name(meaning.problem, "up")
        except MoetuneError as error:
            self._pass(source.path, error.message)
            return None
        leaves_open = source.server.name == "vllm" != server.name and source.name.dtype == "fp8_w8a8"
        if leaves_open and not quantization.block_shape and not meaning.complete:
            notes.append("one scale for a whole tensor is taken for granted: vLLM's names do not say")
        return meaning, tuple(notes)

    def _experts(self, server: Server, source: _Source, gpu: Gpu) -> int:
        """E on the target: the servers fuse shared experts for different models."""
        layer = self._sizes.layer
        if layer is None or server.name == source.server.name:
            return source.name.E
        try:
            there, here = (
                one.problem(layer, Parallelism(), gpu, ServerOptions()) for one in (source.server, server)
            )
        except MoetuneError:
            return source.name.E
        return here.E if source.name.E == there.E else source.name.E

    def _best(self, path: str, offers: Sequence[_Offer]) -> _Offer:
        best, *others = sorted(offers, key=lambda offer: offer.rank)
        for other in others:
            self._pass(other.source.path, f"{best.source.path} is nearer for {path.rpartition('/')[2]}")
        return best

    # the tables

    def _make(self, server: Server, offer: _Offer) -> tuple[_Offer, Borrowing, list[TableFile]] | None:
        source, problem = offer.source, offer.meaning.problem
        model = self._performance_model(offer.meaning)
        borrower = Borrower(
            server,
            problem,
            self._judge,
            same_gpu=source.gpu.torch_name == problem.gpu.torch_name,
            same_vendor=source.gpu.vendor == problem.gpu.vendor,
            max_m=self._request.max_m,
            model=model,
            shared_with=self._sharing(server, problem),
        )
        if model is not None and not _can_predict(model, problem):
            borrower.forget_model()
        borrowing = borrower.make(source.up, source.down)
        if not borrowing.up.entries:
            hint = "" if borrowing.predicted else f" ({offer.meaning.note})"
            self._pass(
                source.path, f"no entry runs on {problem.gpu.torch_name}, and nothing replaces them{hint}"
            )
            return None
        tables: dict[Kernel, ConfigTable] = {"up": borrowing.up}
        if borrowing.down is not None:
            tables["down"] = borrowing.down
        try:
            files = [self._file(server, offer, borrowing, kernel, table) for kernel, table in tables.items()]
        except ConfigFileError as error:
            self._pass(source.path, error.message)
            return None
        return offer, borrowing, files

    def _sharing(self, server: Server, problem: Problem) -> tuple[Problem, ...]:
        """What else the server reads a file of that name for: vLLM has no tag for int8_w8a8."""
        name = parse_file_name(server.file_name(problem, "up"))
        plain = meaning_of(server, name, problem.gpu, Sizes()) if name is not None else None
        if plain is None or plain.problem.quantization.dtype is problem.quantization.dtype:
            return ()
        return (plain.problem,)

    def _performance_model(self, meaning: Meaning) -> PerformanceModel | None:
        gpu = meaning.problem.gpu
        if not meaning.complete or gpu.vendor != "NVIDIA" or gpu.compute_capability is None:
            return None
        if self._model is None:
            from moetune.domain.predict import PerformanceModel

            self._model = PerformanceModel.load()
        return self._model

    def _file(
        self, server: Server, offer: _Offer, borrowing: Borrowing, kernel: Kernel, table: ConfigTable
    ) -> TableFile:
        problem = offer.meaning.problem
        kernels = (kernel,) if borrowing.down is not None else KERNELS
        layer = self._sizes.layer
        return TableFile(
            path=server.file_path(problem, kernel),
            text=server.render_table(problem, table),
            provenance=Borrowed(
                kernels=kernels,
                problem=problem,
                complete=offer.meaning.complete,
                origins=offer.source.origins,
                entries=tuple(
                    BorrowedEntry(change.m, change.kernel, change.action.value, change.why)
                    for change in borrowing.changes
                    if change.kernel in (*kernels, "both")
                ),
                model=layer.model if layer is not None else None,
                checks=(
                    Check("fits in closed form", True, f"{problem.gpu.sm}, Triton {server.triton_version}"),
                    Check("one scale for each K tile", True, "or scales for each weight"),
                    Check("measured", None, "nobody has timed it here: moetune verify FILE on that GPU"),
                ),
            ),
        )

    def _lent(self, offer: _Offer, borrowing: Borrowing, files: Iterable[Written]) -> Lent:
        notes = [*offer.source.notes, *offer.notes]
        dropped = any(change.action is Action.DROPPED for change in borrowing.changes)
        if dropped and not borrowing.predicted:
            notes.append(f"what cannot run was dropped, not repaired: {offer.meaning.note}")
        return Lent(
            source=offer.source.path,
            gpu=offer.meaning.problem.gpu.torch_name,
            from_gpu=offer.source.gpu.torch_name,
            kinship=offer.kinship,
            files=tuple(files),
            changes=borrowing.changes,
            notes=tuple(dict.fromkeys(notes)),
            predicted=borrowing.predicted,
        )


def _use_command(server: Server, out: Path) -> str:
    if server.directory_variable is None:
        return ""
    return f"export {server.directory_variable}={shlex.quote(str(out.absolute()))}"


def _can_predict(model: PerformanceModel, problem: Problem) -> bool:
    try:
        model.familiarity(problem)
    except MoetuneError:
        return False
    return True


def _down_of(up_path: Path) -> Path:
    name = parse_file_name(up_path.name)
    assert name is not None
    return up_path.with_name(str(replace(name, down=True)))


def _directory(path: Path) -> str:
    return path.parent.name if path.parent.name.startswith("triton_") else ""


def _numbers(directory: str) -> tuple[int, ...]:
    parts = directory.removeprefix("triton_").split("_")
    return tuple(int(part) for part in parts[:4] if part.isascii() and part.isdigit() and len(part) < 8)
