"""What `moetune borrow` is asked, and what it answers."""

from __future__ import annotations

from collections import Counter
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from moetune import __version__
from moetune.applications.borrow_tables import Action, Change
from moetune.applications.output import Written
from moetune.applications.path_arguments import AnyPaths, as_paths
from moetune.applications.request import DEFAULT_MAX_M, DEFAULT_OUT

SCHEMA = "moetune.borrow/1"


@dataclass(frozen=True, slots=True)
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

    paths: AnyPaths = ()
    _: KW_ONLY
    installed: bool = False
    from_server: str | None = None
    server: str | None = None
    server_version: str | None = None
    triton_version: str | None = None
    gpu: str | tuple[str, ...] = ()
    compute_capability: str | None = None
    max_m: int = DEFAULT_MAX_M
    model: str | None = None
    hidden: int | None = None
    topk: int | None = None
    offline: bool = False
    out: str | Path = DEFAULT_OUT
    force: bool = False

    @property
    def gpu_names(self) -> tuple[str, ...]:
        """The names of GPUs that were given."""
        return (self.gpu,) if isinstance(self.gpu, str) else self.gpu

    @property
    def files(self) -> tuple[Path, ...]:
        """The paths that are named."""
        return as_paths(self.paths)


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
