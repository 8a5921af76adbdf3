"""Writes config files with their provenance, and lets no problem take another one's file unasked."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from moetune.applications.atomic import Places, open_places
from moetune.applications.provenance import (
    LIMITS,
    SUFFIX,
    Borrowed,
    Kind,
    Provenance,
    Recorded,
    provenance_name,
    read_provenance,
    render_provenance,
    text_sha256,
)
from moetune.domain.errors import InputError, OutputError
from moetune.domain.identity import differences, fingerprint, identity
from moetune.domain.safe_json import DEFAULT_LIMITS
from moetune.domain.server_kernel import OWN
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from moetune.domain.problem import Problem

# The union of both servers' names (source: get_config_file_name of sglang 0.5.23 and vllm 0.33.0).
# A device name may hold whatever torch reports but what would end a component of the path or the
# field; `,` stands between the fields.
_FILE_NAME = re.compile(
    r"E=[1-9][0-9]{0,5},N=[1-9][0-9]{0,6},device_name=(?P<device>[^\x00-\x20/\\,\x7f]{1,128})"
    r"(?:,dtype=[a-z0-9_]{1,32})?(?:,block_shape=\[[1-9][0-9]{0,5}, ?[1-9][0-9]{0,5}\])?"
    r"(?:,per_channel_quant=True)?(?:_down)?\.json",
)
_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", re.ASCII)
_MAX_FOLDERS = 8
_MAX_NAME_BYTES = 255
_FORCE = "give another place with --out DIR, or --force to replace what is there"


class State(str, Enum):
    """What became of a file."""

    WRITTEN = "written"
    REPLACED = "replaced"
    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True)
class TableFile:
    """A config file to write.

    Attributes:
        path: below the output directory, `/` between its parts, as the server's `file_path` gives it.
        text: the server's own JSON.
        provenance: what is written beside it.
    """

    path: str
    text: str
    provenance: Provenance | Borrowed


@dataclass(frozen=True, slots=True)
class Written:
    """A config file as it now stands.

    Attributes:
        path: the config file.
        provenance: the file beside it.
        state: what became of it.
        shared_with: in what the problem of the file that stands there differs, when two problems
            share this file and want the same configs; the provenance is then the other's.
    """

    path: Path
    provenance: Path
    state: State
    shared_with: str = ""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to do about one file: `conflict` says why nothing may be done without --force."""

    state: State
    texts: dict[str, str]
    conflict: str = ""
    shared_with: str = ""


def check_path(path: str) -> None:
    """Refuse a path that is not a config file of the servers' grammar below a directory.

    Raises:
        OutputError: naming the part that is wrong.
    """
    *folders, name = path.split("/")
    bad = next((part for part in folders if not _FOLDER.fullmatch(part) or ".." in part), None)
    if bad is not None or len(folders) > _MAX_FOLDERS:
        raise OutputError(f"{printable(path)!r} is no path of a config file: {printable(bad or path, 60)!r}")
    match = _FILE_NAME.fullmatch(name)
    device = match["device"] if match else ""
    # `.json` inside would let a config file pass for another one's provenance.
    if not device.isprintable() or not device or ".." in device or ".json" in device:
        raise OutputError(
            f"{printable(name, 200)!r} is no name of a config file",
            "the name of the GPU must be as torch gives it, without separators or control characters",
        )
    if len((name + SUFFIX).encode()) > _MAX_NAME_BYTES:
        raise OutputError(f"{printable(name, 200)!r} is too long for a file name")


def write_tables(files: Sequence[TableFile], out: Path, *, force: bool = False) -> tuple[Written, ...]:
    """Write config files and their provenance, all or none.

    A file of another problem, one with measured times where these are predicted, one that was
    changed by hand and one that moetune did not write are replaced only with `force`. A file that
    already holds the same text is left as it is.

    Args:
        files: what to write; of a pair the up file first.
        out: the directory below which the paths lie; made when it is missing.
        force: replace what stands there.

    Returns:
        One for each different path, in the order of `files`.

    Raises:
        OutputError: when something cannot or must not be written; nothing was then changed.
    """
    wanted = _by_path(files)
    paths = [path for config in wanted for path in (config, provenance_name(config))]
    with open_places(out, paths) as places:
        plans = {path: _plan(places, file, force) for path, file in wanted.items()}
        _refuse_conflicts(plans, out)
        texts = {path: text for plan in plans.values() for path, text in plan.texts.items()}
        if texts:
            places.replace(texts)
    return tuple(
        Written(out / path, out / provenance_name(path), plan.state, plan.shared_with)
        for path, plan in plans.items()
    )


def _by_path(files: Sequence[TableFile]) -> dict[str, TableFile]:
    wanted: dict[str, TableFile] = {}
    for file in files:
        check_path(file.path)
        other = wanted.setdefault(file.path, file)
        here, there = identity(file.provenance.problem), identity(other.provenance.problem)
        if other.text != file.text or here != there:
            raise OutputError(
                f"two of the tables asked for share the file {printable(file.path, 200)}: "
                f"{differences(here, there) or 'the same problem with other configs'}",
                "write them one after the other, each with an --out DIR of its own",
            )
    return wanted


def _plan(places: Places, file: TableFile, force: bool) -> _Plan:
    beside = provenance_name(file.path)
    texts = {file.path: file.text, beside: render_provenance(file.provenance, file.text)}
    content = places.read(file.path, DEFAULT_LIMITS.max_bytes)
    recorded_bytes = places.read(beside, LIMITS.max_bytes)
    if content is None:
        return _Plan(State.WRITTEN, texts)
    recorded = _recorded(recorded_bytes, beside)
    if content == file.text.encode():
        return _same_text(file, texts, beside, recorded, recorded_bytes, force)
    conflict = "" if force else _conflict(file, content, recorded)
    return _Plan(State.REPLACED, texts, conflict)


def _same_text(
    file: TableFile,
    texts: dict[str, str],
    beside: str,
    recorded: Recorded | None,
    recorded_bytes: bytes | None,
    force: bool,
) -> _Plan:
    """The config file is as it should be; the provenance stays when it says more than ours."""
    text = texts[beside]
    ours = {} if recorded_bytes == text.encode() else {beside: text}
    if recorded is None or force or recorded.config_sha256 != text_sha256(file.text):
        return _Plan(State.UNCHANGED, ours)
    if not _same_problem(file.provenance.problem, recorded):
        said = differences(identity(file.provenance.problem), recorded.identity)
        return _Plan(State.UNCHANGED, {}, shared_with=said or "another problem")
    if _knows_less(file.provenance, recorded):
        return _Plan(State.UNCHANGED, {})
    return _Plan(State.UNCHANGED, ours)


def _conflict(file: TableFile, content: bytes, recorded: Recorded | None) -> str:
    """Why the file that stands there may not be replaced; empty when it may."""
    if recorded is None:
        return "exists, and moetune did not write it"
    if recorded.config_sha256 != text_sha256(content.decode("utf-8", "replace")):
        return "was changed since moetune wrote it"
    if not _same_problem(file.provenance.problem, recorded):
        said = differences(identity(file.provenance.problem), recorded.identity)
        return f"is for another problem that shares its name: {said or 'by its fingerprint'}"
    if _knows_less(file.provenance, recorded):
        return f"holds {recorded.kind.value} configs, and these are {file.provenance.kind.value}"
    return ""


def _same_problem(problem: Problem, recorded: Recorded) -> bool:
    """Whether a file is for the same problem, whichever kernel was timed for it."""
    if recorded.fingerprint == fingerprint(problem):
        return True
    here = identity(replace(problem, kernel_source=OWN))
    return here == {**recorded.identity, "kernel_source": OWN}


def _knows_less(provenance: Provenance | Borrowed, recorded: Recorded) -> bool:
    kinds = list(Kind)  # in ascending order of what they know
    return kinds.index(provenance.kind) < kinds.index(recorded.kind)


def _recorded(content: bytes | None, source: str) -> Recorded | None:
    if content is None:
        return None
    try:
        return read_provenance(content, source)
    except InputError:
        return None


def _refuse_conflicts(plans: dict[str, _Plan], out: Path) -> None:
    conflicts = [
        f"{printable(str(out / path), 400)} {plan.conflict}" for path, plan in plans.items() if plan.conflict
    ]
    if conflicts:
        more = [f"and {len(conflicts) - 4} more files"] if len(conflicts) > 4 else []
        raise OutputError("; ".join(conflicts[:4] + more), _FORCE)
