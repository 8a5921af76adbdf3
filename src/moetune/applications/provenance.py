"""What stands beside a config file: which problem it is for, how its numbers came about, what was checked.

Nothing but what a server's loader accepts goes into the config file itself, so all this goes into a
file of its own next to it. Both servers open config files by their exact names and list nothing but
the `triton_*` entries of SGLang's `configs/`, so they never read it.

The text is the same for the same inputs: no time of day, no host, no path.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import moetune
from moetune.domain.codec import to_json
from moetune.domain.errors import InputError
from moetune.domain.familiarity import Familiarity
from moetune.domain.identity import fingerprint, identity, problem_from_json, problem_to_json
from moetune.domain.safe_json import JsonLimits, load_json_object
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moetune.domain.choose import Choices
    from moetune.domain.problem import Kernel, Problem

SCHEMA = "moetune.provenance/1"
BORROWED_SCHEMA = "moetune.borrowed/1"
SUFFIX = ".provenance.json"
LIMITS = JsonLimits(max_bytes=1 << 20, max_depth=16)


class Kind(str, Enum):
    """Where times come from."""

    BORROWED = "borrowed"
    PREDICTED = "predicted"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was asked of the configs before they were written.

    Attributes:
        name: what was asked (`fits in shared memory`, `compiled for sm_120`, `matches the reference`).
        passed: None: it was not done.
        detail: with what, or why not.
    """

    name: str
    passed: bool | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Conditions:
    """How times were taken; for predicted ones what they stand for.

    Attributes:
        noise: relative difference of two times that means nothing.
        l2: `cold` or `warm`: whether the weights lay in the L2 cache.
        repeats: measurements behind each time; None: predicted.
        spread: relative spread of those measurements; None: predicted.
    """

    noise: float
    l2: str = "cold"
    repeats: int | None = None
    spread: float | None = None


@dataclass(frozen=True, slots=True)
class Provenance:
    """What is known about one config file.

    Attributes:
        kind: predicted or measured.
        kernels: the kernels that the file is for.
        problem: what its entries are best for: GPU, server, Triton, kernel source and routing too.
        choices: the entry of each m with the times of both kernels and of the server's default.
        conditions: how those times came about.
        model: name of the checkpoint, where one was given.
        checks: what was asked of the configs.
        familiarity: for predicted times.
        added_keys: keys that stand there because an m between others would have lost.
        shortfalls: m that are still served worse than by the default.
    """

    kind: Kind
    kernels: tuple[Kernel, ...]
    problem: Problem
    choices: Choices
    conditions: Conditions
    model: str | None = None
    checks: tuple[Check, ...] = ()
    familiarity: Familiarity | None = None
    added_keys: tuple[int, ...] = ()
    shortfalls: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Origin:
    """The file that a config file was borrowed from.

    Attributes:
        server: whose file it was.
        file_name: its name.
        directory: of its Triton version; empty where the server has none.
        sha256: of its bytes.
    """

    server: str
    file_name: str
    directory: str
    sha256: str


@dataclass(frozen=True, slots=True)
class BorrowedEntry:
    """What became of one entry: `kernel` is `up`, `down` or `both`."""

    m: int
    kernel: str
    action: str
    why: str


@dataclass(frozen=True, slots=True)
class Borrowed:
    """What is known about a config file that was made from one of another GPU, server or Triton version.

    Attributes:
        kernels: the kernels that the file is for.
        problem: what it is for now; K and topk are 0 and 1 where nobody said them.
        complete: K and topk are known.
        origins: the files it was made from.
        entries: what became of each entry.
        model: name of the checkpoint, where one was given.
        checks: what was asked of the configs.
    """

    kernels: tuple[Kernel, ...]
    problem: Problem
    complete: bool
    origins: tuple[Origin, ...]
    entries: tuple[BorrowedEntry, ...]
    model: str | None = None
    checks: tuple[Check, ...] = ()

    @property
    def kind(self) -> Kind:
        """Borrowed: nobody has timed it here."""
        return Kind.BORROWED


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a provenance file says that decides whether its config file may be replaced.

    Attributes:
        kind: borrowed, predicted or measured.
        fingerprint: of the problem.
        identity: the problem as it was when the file was written.
        config_sha256: of the config file that it stands beside.
        problem: the problem, where this version can read it.
    """

    kind: Kind
    fingerprint: str
    identity: Mapping[str, Any]
    config_sha256: str
    problem: Problem | None


def provenance_name(config_name: str) -> str:
    """The file that stands beside a config file."""
    return config_name + SUFFIX


def text_sha256(text: str) -> str:
    """Digest of a file's text."""
    return hashlib.sha256(text.encode()).hexdigest()


def render_provenance(provenance: Provenance | Borrowed, config_text: str) -> str:
    """The text of the provenance file of a config file with that text."""
    if isinstance(provenance, Borrowed):
        document = _borrowed_document(provenance, config_text)
    else:
        document = _document(provenance, config_text)
    return json.dumps(document, indent=2, sort_keys=True, allow_nan=False) + "\n"


def _borrowed_document(borrowed: Borrowed, config_text: str) -> dict[str, Any]:
    return {
        "schema": BORROWED_SCHEMA,
        "moetune": moetune.__version__,
        "kind": borrowed.kind.value,
        "verified": False,
        "kernels": list(borrowed.kernels),
        "config_sha256": text_sha256(config_text),
        "fingerprint": fingerprint(borrowed.problem),
        "identity": identity(borrowed.problem),
        "problem": problem_to_json(borrowed.problem) if borrowed.complete else None,
        "model": borrowed.model,
        "origins": to_json(borrowed.origins),
        "checks": to_json(borrowed.checks),
        "entries": to_json(borrowed.entries),
    }


def _document(provenance: Provenance, config_text: str) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "moetune": moetune.__version__,
        "kind": provenance.kind.value,
        "kernels": list(provenance.kernels),
        "one_file": provenance.choices.one_file,
        "config_sha256": text_sha256(config_text),
        "fingerprint": fingerprint(provenance.problem),
        "identity": identity(provenance.problem),
        "problem": problem_to_json(provenance.problem),
        "model": provenance.model,
        "kernel": provenance.problem.kernel_source,
        "conditions": rounded(to_json(provenance.conditions)),
        "checks": to_json(provenance.checks),
        "familiarity": rounded(to_json(provenance.familiarity)),
        "added_keys": list(provenance.added_keys),
        "shortfalls": list(provenance.shortfalls),
        "entries": [rounded(choice.to_json()) for choice in provenance.choices.entries],
    }


def read_provenance(text: str | bytes, source: str) -> Recorded:
    """Read a provenance file, which may come from anywhere.

    Raises:
        InputError: for what is none, or is of a schema that this version does not know.
    """
    document = load_json_object(text, source, LIMITS)
    where = printable(source, 400)
    schema = document.get("schema")
    if schema not in (SCHEMA, BORROWED_SCHEMA):
        raise InputError(f"{where} has the schema {printable(str(schema), 40)!r}, not {SCHEMA}")
    kinds = {kind.value: kind for kind in Kind}
    digest, config_sha256 = document.get("fingerprint"), document.get("config_sha256")
    kind, of_problem = document.get("kind"), document.get("identity")
    if not (isinstance(kind, str) and kind in kinds and isinstance(of_problem, dict)):
        raise InputError(f"{where} does not say its kind and its problem")
    if not (isinstance(digest, str) and isinstance(config_sha256, str)):
        raise InputError(f"{where} lacks a digest")
    try:
        problem = problem_from_json(document.get("problem"), where)
    except (InputError, ValueError, TypeError):
        problem = None  # another version's; what decides about the file is above
    return Recorded(kinds[kind], digest, of_problem, config_sha256, problem)


def rounded(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Six digits: more would differ between two processors' libraries, and mean nothing."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
