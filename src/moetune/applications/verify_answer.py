"""What `moetune verify` is asked, and what it answers."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetune import __version__
from moetune.applications.install_checks import FATAL
from moetune.applications.lint_report import finding_to_json
from moetune.applications.path_arguments import AnyPaths, as_paths
from moetune.applications.provenance import rounded
from moetune.applications.request import DEFAULT_MAX_M
from moetune.applications.server_kernels import AUTO, KernelChoice
from moetune.domain.codec import to_json
from moetune.domain.config import ConfigTable, KernelConfig
from moetune.domain.errors import InputError
from moetune.domain.findings import Finding
from moetune.domain.identity import problem_to_json
from moetune.domain.keys import LARGEST_M
from moetune.domain.problem import Kernel, Problem
from moetune.servers.protocol import Lookup, Server

if TYPE_CHECKING:
    from moetune.measure.protocol import DeviceFacts

SCHEMA = "moetune.verify/1"


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """Which files to verify, and as which server would read them.

    Attributes:
        paths: config files, and directories of them.
        model: a checkpoint, which says K, topk and what else a name does not.
        tp: tensor-parallel size; None: what the name's N says of the model.
        ep: expert-parallel size; None: what the name's E says of the model.
        hidden: K by hand.
        topk: experts a token goes to, by hand.
        server: `sglang`, `vllm` or a plug-in; None: what the files say, else what is installed.
        server_version: its release; None: the installed one, else the files' own, else the newest.
        triton_version: its Triton; None: likewise.
        compute_capability: of a GPU that the registry does not know.
        max_m: the largest m that the server can meet.
        deterministic: deterministic (SGLang) or batch-invariant (vLLM) inference is on.
        between: measure between the keys too, and on both sides of each switch of the default.
        lookup_only: touch no GPU.
        require_gpu: entries that cannot be measured are an error.
        devices: places of the GPUs in the driver's order; empty takes the first of the files' kind.
        python: the interpreter that measures, of an environment with torch and Triton.
        kernel: which kernel is timed, as for tuning: `auto`, `own` or `server`.
        server_files: a folder with the Python files of a server, whose kernel is timed.
        share_gpu: go on although something else computes on the GPU.
        state: where runs are kept; None takes MOETUNE_STATE, else the XDG state directory.
        seed: of data and routings; each seed has a journal of its own.
        offline: never ask the network.
    """

    paths: AnyPaths = ()
    _: KW_ONLY
    model: str | None = None
    tp: int | None = None
    ep: int | None = None
    hidden: int | None = None
    topk: int | None = None
    server: str | None = None
    server_version: str | None = None
    triton_version: str | None = None
    compute_capability: str | None = None
    max_m: int = DEFAULT_MAX_M
    deterministic: bool = False
    between: bool = False
    lookup_only: bool = False
    require_gpu: bool = False
    devices: tuple[int, ...] = ()
    python: str | None = None
    kernel: str = AUTO
    server_files: Path | None = None
    share_gpu: bool = False
    state: str | Path | None = None
    seed: int = 0
    offline: bool = False

    @property
    def files(self) -> tuple[Path, ...]:
        """The paths that are named."""
        return as_paths(self.paths)

    def __post_init__(self) -> None:
        if not self.files:
            raise InputError("nothing is named to verify", "name config files or a directory of them")
        if self.lookup_only and self.asks_for_gpu:
            raise InputError(
                "--lookup-only touches no GPU, and other options ask for one", "leave one of them out"
            )
        if len(set(self.devices)) < len(self.devices) or any(not 0 <= n < 1024 for n in self.devices):
            raise InputError("--devices names no GPUs", "give their numbers once each, as in 0,1")
        if (self.tp is not None or self.ep is not None) and self.model is None:
            raise InputError("--tp and --ep split a model, and none is named", "add --model MODEL")
        if self.model is not None and (self.hidden is not None or self.topk is not None):
            raise InputError("--hidden and --topk are the model's, which --model names", "leave them out")
        if not (1 <= self.max_m <= LARGEST_M and 0 <= self.seed < 1 << 31):
            raise InputError(f"max_m is a whole number from 1 to {LARGEST_M}, a seed one from 0")

    @property
    def asks_for_gpu(self) -> bool:
        """Whether a person said that entries must be measured."""
        return self.require_gpu or bool(self.devices) or self.python is not None or self.share_gpu


class Verdict(str, Enum):
    """What is said of an entry."""

    FASTER = "faster"
    SAME = "same"
    SLOWER = "slower"
    WRONG = "wrong"
    CANNOT_RUN = "cannot run"
    NOT_MEASURED = "not measured"

    @property
    def is_no(self) -> bool:
        """Whether an entry of this kind should not be served."""
        return self in (Verdict.SLOWER, Verdict.WRONG, Verdict.CANNOT_RUN)


@dataclass(frozen=True, slots=True)
class VerifiedFile:
    """One config file as its server sees it.

    Attributes:
        path: the file.
        kernel: the kernel that it is for.
        named: a person named it; else the server loads it along with one that was.
        lookup: what the server's own lookup does; None where it never looks for such a name.
        reads: the lookup ends with this very file.
        says: the same in words.
        unreadable: what the loader dies of; empty when it reads the file.
        mend: the command that puts it where it is read; empty when nothing is to be done.
        use: the command that makes the server read its directory; empty when it does already.
        note: what else there is to say.
    """

    path: str
    kernel: Kernel
    named: bool
    lookup: Lookup | None
    reads: bool
    says: str
    unreadable: str = ""
    mend: str = ""
    use: str = ""
    note: str = ""

    @property
    def is_no(self) -> bool:
        """Whether the server cannot run with it."""
        return not self.reads or bool(self.unreadable)


@dataclass(frozen=True, slots=True)
class Numerics:
    """One config against the fp32 reference at one m."""

    kernel: Kernel
    relative_error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the numbers are right."""
        return self.relative_error <= self.tolerance


@dataclass(frozen=True, slots=True)
class Pick:
    """Some m at which the server picks one pair of entries, and the m at which it is measured.

    Attributes:
        m: where it is measured.
        first: the first m of the stretch.
        last: the last one.
        up_key: key of the up entry; None: there is no file, so the server's default.
        down_key: likewise.
        up: the up kernel's config.
        down: the down kernel's, as it stands in the file.
    """

    m: int
    first: int
    last: int
    up_key: int | None
    down_key: int | None
    up: KernelConfig
    down: KernelConfig


@dataclass(frozen=True, slots=True)
class Entry:
    """A pick, and what was measured of it.

    Attributes:
        pick: which m, and which configs.
        verdict: in a word.
        why: the reason, where the word needs one.
        default_us: the layer with the server's default pair; None: not timed.
        file_us: the layer with the file's pair.
        ratio: file over default, the median over rounds of both in one round; over 1 is slower.
        spread: relative half-width of the 95% interval of that median.
        noise: what a difference had to exceed.
        skewed_ratio: the same as `ratio` under a skewed routing.
        numerics: both kernels against the reference.
    """

    pick: Pick
    verdict: Verdict = Verdict.NOT_MEASURED
    why: str = ""
    default_us: float | None = None
    file_us: float | None = None
    ratio: float | None = None
    spread: float | None = None
    noise: float | None = None
    skewed_ratio: float | None = None
    numerics: tuple[Numerics, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As it stands in the document."""
        pick = self.pick
        return {
            "m": pick.m,
            "first": pick.first,
            "last": pick.last,
            "up_key": pick.up_key,
            "down_key": pick.down_key,
            "up": pick.up.to_json(),
            "down": pick.down.to_json(),
            "verdict": self.verdict.value,
            "why": self.why,
            "default_us": self.default_us,
            "file_us": self.file_us,
            "ratio": self.ratio,
            "spread": self.spread,
            "noise": self.noise,
            "skewed_ratio": self.skewed_ratio,
            "numerics": to_json(self.numerics),
        }


@dataclass(frozen=True, slots=True)
class GpuPart:
    """What a GPU had to say of one pair of files.

    Attributes:
        reason: why nothing was measured; empty where something was.
        devices: names of the GPUs that measured.
        facts: the GPU and the software that measured.
        noise: median of what two runs of the default differed by, at least the floor.
        measured: times taken in this run; 0: all of it was in the journal.
        compilations: kernels that the measuring processes had to compile themselves.
        throttled: why the GPU ran slower than it could at some time.
        journal: where all of it stands.
        remarks: what a person should know about these numbers.
        kernel: which kernel was timed; None where nothing was measured.
    """

    reason: str = ""
    devices: tuple[str, ...] = ()
    facts: DeviceFacts | None = None
    noise: float | None = None
    measured: int = 0
    compilations: int = 0
    throttled: tuple[str, ...] = ()
    journal: str = ""
    remarks: tuple[str, ...] = ()
    kernel: KernelChoice | None = None


@dataclass(frozen=True, slots=True)
class Looked:
    """What is known of a pair of files without a GPU.

    Attributes:
        server: the release that would read them.
        assumed: what nobody said and was taken, in words.
        problem: what they are for; None where the name says nothing. K and topk are 0 and 1 where
            nobody said them.
        complete: K and topk are known.
        known_from: who said them.
        note: why they are not known, with the option that mends it, or what was taken for granted.
        files: up first.
        findings: of lint, worst first.
        tables: of up and down as the server loads them; None: its default.
        picks: which entries each m uses.
        other_kernel: the m at which the server runs a CUDA kernel of its own, in words; they have no pick.
    """

    server: Server
    assumed: tuple[str, ...]
    problem: Problem | None
    complete: bool
    known_from: str
    note: str
    files: tuple[VerifiedFile, ...]
    findings: tuple[Finding, ...]
    tables: tuple[ConfigTable | None, ConfigTable | None] = (None, None)
    picks: tuple[Pick, ...] = ()
    other_kernel: str = ""

    @property
    def is_no(self) -> bool:
        """Whether the server cannot run with these files, or never reads them."""
        fatal = any(found.code.severity.rank <= FATAL.rank for found in self.findings)
        return fatal or any(file.is_no for file in self.files)


@dataclass(frozen=True, slots=True)
class Verified:
    """The answer for one file, or for the two files of one problem."""

    looked: Looked
    gpu: GpuPart
    entries: tuple[Entry, ...]

    @property
    def is_no(self) -> bool:
        """Whether the answer is no."""
        return self.looked.is_no or any(entry.verdict.is_no for entry in self.entries)

    @property
    def is_measured(self) -> bool:
        """Whether every entry was measured."""
        return not self.gpu.reason and all(e.verdict is not Verdict.NOT_MEASURED for e in self.entries)

    @property
    def answer(self) -> str:
        """`yes`, `no`, or `not measured`: nothing was found wrong, and not every entry was measured."""
        return "no" if self.is_no else "yes" if self.is_measured else "not measured"

    def to_json(self) -> dict[str, Any]:
        """As it stands in the document."""
        looked, server = self.looked, self.looked.server
        return {
            "answer": self.answer,
            "measured": self.is_measured,
            "server": {
                "name": server.name,
                "version": server.version,
                "triton_version": server.triton_version,
            },
            "assumed": list(looked.assumed),
            "files": to_json(looked.files),
            "problem": problem_to_json(looked.problem) if looked.problem and looked.complete else None,
            "known_from": looked.known_from,
            "note": looked.note,
            "other_kernel": looked.other_kernel,
            "findings": [finding_to_json(found) for found in looked.findings],
            "gpu": rounded(to_json(self.gpu)),
            "entries": [rounded(entry.to_json()) for entry in self.entries],
        }


@dataclass(frozen=True, slots=True)
class Verification:
    """The answer to `moetune verify`."""

    problems: tuple[Verified, ...]

    @property
    def is_no(self) -> bool:
        """Whether the answer is no for any of the files."""
        return any(one.is_no for one in self.problems)

    @property
    def is_measured(self) -> bool:
        """Whether every entry of every file was measured."""
        return all(one.is_measured for one in self.problems)

    def to_json(self) -> dict[str, Any]:
        """The document of `moetune verify --json`."""
        return {
            "schema": SCHEMA,
            "moetune": __version__,
            "verified": not self.is_no,
            "measured": self.is_measured,
            "problems": [one.to_json() for one in self.problems],
        }
