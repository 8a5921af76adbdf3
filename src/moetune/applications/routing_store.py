"""Recordings that tuning uses: asked for, kept in the state directory by content, found again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.applications.atomic import open_places
from moetune.applications.routings import read_recording
from moetune.applications.state import private_folder
from moetune.domain.errors import InputError
from moetune.domain.recording import MAX_IDS, NOWHERE, PREFIX, Recording
from moetune.domain.synthetic_routing import law_name, skew_of
from moetune.domain.text import printable

if TYPE_CHECKING:
    from moetune.domain.problem import Problem

UNIFORM = "uniform"
_FOLDER = "routings"
_NAME = re.compile(r"recorded:[0-9a-f]{16}")
_MAX_BYTES = 8 * MAX_IDS


@dataclass(frozen=True, slots=True)
class AskedRouting:
    """A routing that tuning shall measure under.

    Attributes:
        name: `uniform`, `zipf:S` or `recorded:ID`, as it stands in the problem.
        recording: what was recorded; None for a law.
        path: the recording as the measuring process reads it; empty for a law.
        remarks: what a person should know of how it was read.
    """

    name: str = UNIFORM
    recording: Recording | None = None
    path: str = ""
    remarks: tuple[str, ...] = ()

    def check(self, problem: Problem) -> None:
        """Refuse a recording of another model.

        Raises:
            InputError: saying in what it differs.
        """
        if self.recording is not None:
            check_fits(self.recording, problem)

    def remarks_for(self, largest_m: int) -> tuple[str, ...]:
        """The remarks, and whether there are tokens enough."""
        rows = [layer.tokens or 0 for layer in self.recording.layers] if self.recording else []
        short = sum(count < largest_m for count in rows)
        if not short:
            return self.remarks
        return (
            *self.remarks,
            f"{short} of {len(rows)} recorded layers have fewer than {largest_m:,} tokens, {min(rows):,} at "
            "least: calls of more tokens pass through them again and again",
        )


def ask_routing(text: str, state: Path, python: str | None = None) -> AskedRouting:
    """What `--routing` means; a recording is read, checked, and kept.

    Args:
        text: `uniform`, `zipf:S`, the `recorded:ID` of one that is kept, or a path.
        state: the state directory.
        python: the interpreter that reads `.pt` files.

    Raises:
        InputError: for what is none of them.
    """
    if _NAME.fullmatch(text):
        path = find_kept(state, text)
        if path is None:
            raise InputError(f"{text} is not kept in {printable(str(state), 200)}", "name its files again")
        return AskedRouting(text, _load(path), str(path))
    if text == UNIFORM or text.partition(":")[0] == "zipf":
        return AskedRouting(law_name(skew_of(text)))
    if not Path(text).exists():
        raise InputError(
            f"{printable(text, 200)!r} is no routing, and nothing of that name is there",
            "give uniform, zipf:1.2, or the files of a recording: --routing DIR",
        )
    read = read_recording([text], python=python)
    path = keep(state, read.recording)
    return AskedRouting(read.recording.routing, read.recording, str(path), read.remarks)


def keep(state: Path, recording: Recording) -> Path:
    """Keep a recording under the name of its content.

    Raises:
        InputError: where only counts are known.
        OutputError: when it cannot be written.
    """
    if not recording.has_ids:
        raise InputError(
            "this recording has counts only: which experts the tokens of a call went to is not known",
            "record with --expert-distribution-recorder-mode per_token",
        )
    folder = private_folder(state.absolute(), _FOLDER, make=True)
    assert folder is not None
    name = f"{recording.identifier}.npz"
    with open_places(folder, [name]) as places:
        places.put(name, recording.to_bytes())
    return folder / name


def find_kept(state: Path, routing: str) -> Path | None:
    """Where the recording of a problem's routing is kept; None for one that is not here, and for a law."""
    if not _NAME.fullmatch(routing):
        return None
    folder = private_folder(state.absolute(), _FOLDER, make=False)
    path = None if folder is None else folder / f"{routing.removeprefix(PREFIX)}.npz"
    return path if path is not None and path.is_file() else None


def kept_for(state: Path, problem: Problem) -> Path | None:
    """Where the recording that a problem names is kept; None where it is not, or is of another model."""
    path = find_kept(state, problem.routing)
    if path is None:
        return None
    try:
        check_fits(_load(path), problem)
    except InputError:
        return None
    return path


def named_routing(text: str) -> str:
    """The routing that a file of somebody else names: `uniform` for what is none."""
    if _NAME.fullmatch(text):
        return text
    try:
        return law_name(skew_of(text))
    except InputError:
        return UNIFORM


def _load(path: Path) -> Recording:
    with open_places(path.parent, [path.name], writing=False) as places:
        content = places.read(path.name, _MAX_BYTES)
    if content is None:
        raise InputError(f"{printable(str(path), 400)} is gone", "name its files again")
    return Recording.from_bytes(content, str(path))


def check_fits(recording: Recording, problem: Problem) -> None:
    """Refuse a recording that is not of this expert layer.

    Columns of fused shared experts, which SGLang puts last and numbers from the routed experts on, may stand
    in it (sglang 0.5.23 wheel, srt/layers/moe/topk.py).

    Raises:
        InputError: saying in what it differs.
    """
    hint = "record with the very model and parallelism that is tuned"
    topk = recording.topk
    if topk is None:
        raise InputError(
            "a recording of counts cannot be drawn from",
            "record with --expert-distribution-recorder-mode per_token",
        )
    shared, everywhere = problem.fused_shared_experts, max(problem.global_experts, problem.routed_experts)
    routed = problem.topk - shared
    if topk not in (routed, routed + shared):
        raise InputError(f"tokens of the recording have {topk} experts, those of the model {routed}", hint)
    if recording.experts_known and not everywhere <= recording.experts <= everywhere + max(shared, 0):
        raise InputError(f"the recording is of {recording.experts} experts, the model has {everywhere}", hint)
    for layer in recording.layers:
        assert layer.ids is not None
        own, fused = layer.ids[:, :routed], layer.ids[:, routed:]
        if int(own.max()) >= everywhere:
            expert = int(own.max())
            raise InputError(
                f"layer {layer.number} of the recording has expert {expert}, the model has {everywhere}", hint
            )
        if int(own.min()) == NOWHERE:
            raise InputError(
                f"layer {layer.number} of the recording has tokens without an expert",
                "record the global numbers, before a rank keeps its own: tuning does that itself",
            )
        if fused.size and int(fused.min()) < everywhere:
            raise InputError(f"the last {shared} columns of the recording are not of fused experts", hint)
