"""Recordings of real servers: read, inspected, turned into what SGLang's separate tuner reads, made up."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moetune.applications.routing_files import RecordedFile, find_files, opened
from moetune.applications.routing_process import AT_A_TIME, read_files, write_files
from moetune.domain.errors import InputError, OutputError
from moetune.domain.recording import (
    MAX_EXPERTS,
    IdArray,
    IntArray,
    RecordedLayer,
    Recording,
    check_ids,
    join_calls,
)
from moetune.domain.text import printable
from moetune.measure.routing_frames import Frame, fresh_room

if TYPE_CHECKING:
    from moetune.domain.recording import Form

TUNER_ROWS = 8192
"""The largest batch size of SGLang's separate tuner, which takes the first rows of each file."""
_SNAPSHOTS = 2  # idx 0 and 1, which are what that tuner reads


@dataclass(frozen=True, slots=True)
class Read:
    """A recording and what a person should know of how it was read.

    Attributes:
        recording: what was read.
        files: how many.
        remarks: sentences.
    """

    recording: Recording
    files: int
    remarks: tuple[str, ...] = ()


def read_recording(
    paths: Sequence[str | Path], *, experts: int | None = None, python: str | None = None
) -> Read:
    """Read a directory of SGLang's tuner, or dumps of its recorder.

    Args:
        paths: files and directories of one recording.
        experts: global experts, where the files do not say or are known better.
        python: the interpreter, of an environment with torch; None takes this one.

    Raises:
        InputError: for what is no recording, or contradicts itself.
        NoTorchError: where there is no torch.
    """
    if experts is not None and not 1 <= experts <= MAX_EXPERTS:
        raise InputError(f"{experts} is no number of experts", f"give 1 to {MAX_EXPERTS}")
    files = find_files(paths)
    gathered = _Gathered(files)
    for frame in _frames(files, python):
        gathered.add(frame)
    return gathered.result(experts)


def _frames(files: Sequence[RecordedFile], python: str | None) -> Iterator[Frame]:
    room, start, rest = fresh_room(), 0, iter(files)
    while part := tuple(islice(rest, AT_A_TIME)):
        with opened(part) as open_files:
            for frame in read_files(open_files, room, python):
                yield replace(frame, file=frame.file + start)
        start += len(part)


@dataclass
class _Gathered:
    """The arrays of all files, by what they are."""

    files: tuple[RecordedFile, ...]
    form: str = ""
    experts: int = 0
    calls: dict[int, list[IdArray]] = field(default_factory=dict)
    passes: dict[int, list[IntArray]] = field(default_factory=dict)
    steps: list[IntArray] = field(default_factory=list)
    seen: dict[tuple[int, bytes], int] = field(default_factory=dict)
    repeated: set[int] = field(default_factory=set)
    shape: tuple[int, ...] = ()

    def add(self, frame: Frame) -> None:
        """Take one in."""
        file = self.files[frame.file]
        form = {"ids": "topk_ids", "detail": "per_token", "pass": "per_pass", "stat": "stat"}[frame.kind]
        if (frame.kind == "ids") != (file.layer is not None):
            hint = "a tensor is named topk_ids_layer3_idx0.pt, a dump expert_distribution_recorder_*.pt"
            raise self._refused(file, "does not hold what its name says", hint)
        if self.form not in ("", form):
            raise self._refused(file, f"is a recording of another kind, {form} beside {self.form}")
        # Layers and columns are the same in all of one recording.
        ends = frame.data.shape[-1:] if frame.kind == "ids" else frame.data.shape[-2:]
        shape = (frame.data.shape[0], frame.data.shape[2]) if frame.kind == "detail" else ends
        if self.form and (shape != self.shape or (frame.experts or self.experts) != self.experts):
            raise self._refused(file, f"is of another model: {shape} is not {self.shape}")
        self.form, self.shape, self.experts = form, shape, frame.experts or self.experts
        getattr(self, f"_add_{frame.kind}")(file, frame)

    def _add_ids(self, file: RecordedFile, frame: Frame) -> None:
        assert file.layer is not None
        self.calls.setdefault(file.layer, []).append(frame.data)

    def _add_detail(self, _: RecordedFile, frame: Frame) -> None:
        if self._is_new(frame):
            for layer, ids in enumerate(frame.data):
                self.calls.setdefault(layer, []).append(ids)

    def _add_pass(self, _: RecordedFile, frame: Frame) -> None:
        if self._is_new(frame):
            self.passes.setdefault(frame.forward_pass, []).append(frame.data)

    def _add_stat(self, _: RecordedFile, frame: Frame) -> None:
        # A buffer that is not full holds passes in which nothing was counted.
        self.steps += [step for step in frame.data if step.any()]

    def _is_new(self, frame: Frame) -> bool:
        """Without data-parallel attention every rank routes the same tokens, and records them."""
        key = frame.forward_pass, hashlib.sha256(np.ascontiguousarray(frame.data).data).digest()
        first = self.seen.setdefault(key, frame.rank)
        if first != frame.rank:
            self.repeated.add(frame.rank)
        return first == frame.rank

    def _refused(self, file: RecordedFile, why: str, hint: str | None = None) -> InputError:
        return InputError(
            f"{printable(str(file.path), 400)} {why}", hint or "name the files of one recording"
        )

    def result(self, experts: int | None) -> Read:
        """The recording."""
        layers = self._layers()
        if not layers:
            raise InputError(
                "nothing was recorded: no token went to any expert",
                "record while requests run: POST /start_expert_distribution_record, then /dump_...",
            )
        known, given = self.experts, experts or 0
        seen = (
            max(int(layer.ids.max()) + 1 for layer in layers if layer.ids is not None)
            if self.calls
            else known
        )
        number = given or known or seen
        if self.calls:
            self._check(layers, number)
        elif number != known:
            raise InputError(f"the counts are of {known} experts, not {number}", "leave --experts out")
        form: Form = self.form  # type: ignore[assignment]
        recording = Recording(form, number, bool(given or known), layers)
        return Read(recording, len(self.files), tuple(self._remarks(recording)))

    @staticmethod
    def _check(layers: Sequence[RecordedLayer], experts: int) -> None:
        highest = max(layers, key=lambda layer: int(layer.ids.max()) if layer.ids is not None else 0)
        assert highest.ids is not None
        try:
            check_ids(highest.ids, experts)
        except ValueError as error:
            raise InputError(
                f"layer {highest.number}: {error}",
                "give their true number with --experts; where shared experts are fused they count too",
            ) from error

    def _layers(self) -> tuple[RecordedLayer, ...]:
        if self.calls:
            joined = (join_calls(number, calls) for number, calls in sorted(self.calls.items()))
            layers = tuple(layer for layer in joined if layer is not None)
            widths = {layer.ids.shape[1] for layer in layers if layer.ids is not None}
            if len(widths) > 1:
                raise InputError(
                    f"tokens have {min(widths)} experts in one layer and {max(widths)} in another"
                )
            return layers
        counts = self.steps or [sum(ranks[1:], ranks[0]) for _, ranks in sorted(self.passes.items())]
        if not counts:
            return ()
        table = np.stack(counts)  # passes, layers, experts
        busy = np.flatnonzero(table.any(axis=(0, 2))).tolist()
        return tuple(RecordedLayer(layer, counts=table[:, layer]) for layer in busy)

    def _remarks(self, recording: Recording) -> Iterator[str]:
        if not recording.experts_known:
            yield (
                f"the number of experts is the largest that was seen, and one: {recording.experts}; "
                "give the true one with --experts"
            )
        if self.repeated:
            ranks = ", ".join(map(str, sorted(self.repeated)[:8]))
            yield f"what ranks {ranks} recorded is what another rank recorded too, and counts once"
        if recording.form == "stat":
            yield (
                "a recording in mode stat has counts only, summed over all ranks: the balance is known, "
                "the experts of single tokens and the blocks of a call are not; record with "
                "--expert-distribution-recorder-mode per_token"
            )
        if recording.form == "per_pass":
            yield (
                "a recording in mode per_pass has counts only: the experts of single tokens are not known, "
                "nor the blocks of calls of other sizes; record with "
                "--expert-distribution-recorder-mode per_token"
            )


def for_tuner(recording: Recording) -> tuple[Recording, tuple[str, ...]]:
    """A recording as SGLang's separate tuner reads it: two calls a layer, its snapshots idx 0 and 1.

    Returns:
        The recording, and what a person should know of it.

    Raises:
        InputError: where only counts are known.
    """
    if not recording.has_ids:
        raise InputError(
            "this recording has counts only: the tuner needs the experts of each token",
            "record with --expert-distribution-recorder-mode per_token",
        )
    layers = recording.layers
    if recording.form == "per_token":
        layers = tuple(_halved(layer) for layer in layers)
    rows = min(tokens for layer in layers for tokens in layer.calls)
    remarks = []
    if rows < TUNER_ROWS:
        remarks.append(
            f"files have {rows:,} rows and more: SGLang's tuner takes the first M rows of each, and fails "
            f"with batch sizes over {rows:,}"
        )
    if min(len(layer.calls) for layer in layers) < _SNAPSHOTS:
        remarks.append("there is one call for some layers: SGLang's tuner reads idx0 and idx1")
    return replace(recording, layers=layers), tuple(remarks)


def _halved(layer: RecordedLayer) -> RecordedLayer:
    """Passes of a server are of all sizes; the tuner wants two that are large."""
    assert layer.ids is not None
    half = len(layer.ids) // _SNAPSHOTS
    return replace(layer, ids=layer.ids[: _SNAPSHOTS * half], calls=(half,) * _SNAPSHOTS) if half else layer


def write_directory(recording: Recording, out: str | Path, python: str | None = None) -> tuple[str, ...]:
    """Write `topk_ids_layer{L}_idx{I}.pt` files into a new directory; it is there whole, or not at all.

    Args:
        recording: with the experts of each token.
        out: a directory that is not there, or empty.
        python: the interpreter, of an environment with torch; None takes this one.

    Returns:
        The names.

    Raises:
        OutputError: when it cannot be written.
        NoTorchError: where there is no torch.
    """
    target = Path(os.path.abspath(out))  # noqa: PTH100 - resolve() would follow links
    shown = printable(str(out), 400)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(target) and (target.is_symlink() or not target.is_dir() or any(target.iterdir())):
            raise OutputError(f"{shown} is there and not an empty directory", "name a new one with --out")
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
            whole = Path(temporary) / "whole"
            whole.mkdir()
            folder = os.open(whole, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                names = tuple(name for name, _ in _tensors(recording))
                write_files(folder, _tensors(recording), python)
            finally:
                os.close(folder)
            whole.rename(target)
    except OSError as error:
        raise OutputError(
            f"{shown} cannot be written: {error.strerror}", "name another place with --out"
        ) from error
    return names


def _tensors(recording: Recording) -> Iterator[tuple[str, IdArray]]:
    for layer in recording.layers:
        assert layer.ids is not None
        row = 0
        for index, tokens in enumerate(layer.calls):
            yield f"topk_ids_layer{layer.number}_idx{index}.pt", layer.ids[row : row + tokens]
            row += tokens
