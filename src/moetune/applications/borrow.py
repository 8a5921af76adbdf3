"""`moetune borrow`: files of another GPU, server or Triton version, made safe and labelled unmeasured."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.applications.borrow_answer import Borrow, BorrowRequest, Lent
from moetune.applications.borrow_sources import Lenders, Source
from moetune.applications.borrow_tables import Action, Borrower, Borrowing
from moetune.applications.file_meaning import Meaning, Sizes, meaning_of, packing
from moetune.applications.lint import sizes_of
from moetune.applications.lint_file import FileJudge
from moetune.applications.lint_report import LintRequest
from moetune.applications.output import TableFile, Written, write_tables
from moetune.applications.provenance import Borrowed, BorrowedEntry, Check
from moetune.domain.config import ConfigTable
from moetune.domain.errors import ConfigFileError, InputError, MoetuneError
from moetune.domain.file_names import parse_file_name
from moetune.domain.gpu import Gpu, find_gpu
from moetune.domain.gpu_siblings import siblings
from moetune.domain.problem import KERNELS, Parallelism
from moetune.domain.space import dtype_violation
from moetune.servers.other_kernel import cuda_kernel_until, with_own_entries
from moetune.servers.protocol import Server, ServerOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from moetune.domain.predict import PerformanceModel
    from moetune.domain.problem import Kernel, Problem

_UNLIKE = 1_000


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
class _Offer:
    """A source for one target."""

    source: Source
    meaning: Meaning
    kinship: str
    rank: tuple[int, tuple[int, ...], str]
    notes: tuple[str, ...]


class _Borrowing:
    def __init__(
        self, request: BorrowRequest, environ: Mapping[str, str], model: PerformanceModel | None
    ) -> None:
        self._request, self._model = request, model
        self._sizes = sizes_of(
            LintRequest(
                model=request.model, hidden=request.hidden, topk=request.topk, offline=request.offline
            )
        )
        self._gpus = tuple(
            find_gpu(name, compute_capability=request.compute_capability) for name in request.gpu_names
        )
        self._lenders = Lenders(request, environ)
        self._pass = self._lenders.pass_over

    def run(self) -> Borrow:
        request = self._request
        if not request.files and not request.installed:
            raise InputError(
                "nothing is named to borrow from", "name config files or directories, or add --installed"
            )
        files = self._lenders.files()
        server = self._lenders.target(files)
        self._judge = FileJudge(server, max_m=request.max_m, sizes=self._sizes)
        offers: dict[str, list[_Offer]] = {}
        for source in self._lenders.sources(files):
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
            passed_over=tuple(sorted(self._lenders.passed, key=lambda one: (str(one.source), one.reason))),
            assumed=tuple(dict.fromkeys(self._lenders.assumed)),
            use_command=_use_command(server, Path(request.out)) if written else "",
        )

    # for which target

    def _offer(self, server: Server, source: Source, gpu: Gpu) -> _Offer | None:
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

    def _kinship(self, source: Source, gpu: Gpu) -> tuple[int, str] | None:
        if source.gpu.torch_name == gpu.torch_name:
            return 0, ""
        for place, sibling in enumerate(siblings(gpu), start=1):
            if sibling.gpu.torch_name == source.gpu.torch_name:
                return place, f"{sibling.reason} (confidence {sibling.confidence})"
        if source.named:
            return _UNLIKE, f"{source.gpu.torch_name} is no sibling of {gpu.torch_name}: expect little"
        self._pass(source.path, f"{source.gpu.torch_name} is no sibling of {gpu.torch_name}")
        return None

    def _translate(self, server: Server, source: Source, gpu: Gpu) -> tuple[Meaning, tuple[str, ...]] | None:
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

    def _experts(self, server: Server, source: Source, gpu: Gpu) -> int:
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
        if cuda_kernel_until(server, problem) and not offer.meaning.complete:
            why = f"{server.name} {server.version} runs few tokens with a CUDA kernel, how many topk says"
            self._pass(source.path, f"{why}: {offer.meaning.note}")
            return None
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
            text=server.render_table(problem, with_own_entries(server, problem, table)),
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


def _numbers(directory: str) -> tuple[int, ...]:
    parts = directory.removeprefix("triton_").split("_")
    return tuple(int(part) for part in parts[:4] if part.isascii() and part.isdigit() and len(part) < 8)
