"""A recording: which experts the tokens of a real server went to, layer by layer.

Numbers of experts are global ones; NOWHERE stands where a slot has no expert: a padded token, or one
whose expert another rank holds. What is kept or handed to another process is a plain npz file with no
pickle in it.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import zipfile
import zlib
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moetune.domain.errors import InputError
from moetune.domain.text import printable

IntArray = NDArray[np.int64]
IdArray = NDArray[np.int32]

NOWHERE = -1
MAX_EXPERTS = 1 << 16
MAX_TOPK = 128
MAX_LAYERS = 4096
MAX_IDS = 1 << 27
"""Slots of a recording: 58 layers of 280,000 tokens with 8 experts each; half a GiB."""

PREFIX = "recorded:"
_HASH_CHARACTERS = 16
_DAMAGE = (
    *(OSError, ValueError, LookupError, TypeError, ArithmeticError, EOFError, MemoryError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error, struct.error),
)
"""What numpy and zipfile raise of a file that is damaged or of somebody else."""

Form = Literal["topk_ids", "per_token", "per_pass", "stat", "synthetic"]


@dataclass(frozen=True, slots=True)
class RecordedLayer:
    """One layer with experts.

    Attributes:
        number: of the layer in its model.
        ids: `[tokens, topk]`, the experts of each token, calls one after another; None where only
            counts are known.
        calls: tokens of each call of the layer; empty where only counts are known.
        counts: `[passes, experts]`, slots of each expert in each forward pass; None where ids are known.
    """

    number: int
    ids: IdArray | None = None
    calls: tuple[int, ...] = ()
    counts: IntArray | None = None

    @property
    def tokens(self) -> int | None:
        """Tokens; None where only counts are known."""
        return None if self.ids is None else len(self.ids)

    def loads(self, experts: int) -> IntArray:
        """Slots of each expert, over all calls: `[experts]`."""
        if self.counts is not None:
            total: IntArray = self.counts.sum(axis=0)
            return total
        return count_ids(self.ids, experts)

    def loads_of_calls(self, experts: int) -> IntArray:
        """Slots of each expert in each call: `[calls, experts]`."""
        if self.counts is not None:
            return self.counts
        assert self.ids is not None
        ends = np.cumsum(self.calls)
        rows = [
            count_ids(self.ids[end - tokens : end], experts)
            for tokens, end in zip(self.calls, ends.tolist(), strict=True)
        ]
        return np.stack(rows)


@dataclass(frozen=True, slots=True)
class Recording:
    """Layers of one server.

    Attributes:
        form: what it was read from.
        experts: global experts, redundant ones and fused shared ones included where they are numbered.
        experts_known: the source says so; otherwise it is the largest number seen, and one.
        layers: by number, ascending.
    """

    form: Form
    experts: int
    experts_known: bool
    layers: tuple[RecordedLayer, ...]

    @property
    def has_ids(self) -> bool:
        """Whether the experts of single tokens are known, in every layer."""
        return all(layer.ids is not None for layer in self.layers)

    @property
    def topk(self) -> int | None:
        """Experts of a token; None where only counts are known."""
        return self.layers[0].ids.shape[1] if self.layers and self.layers[0].ids is not None else None

    @property
    def identifier(self) -> str:
        """A name of its content: 64 bits of SHA-256 over the layers' numbers, calls and experts."""
        digest = hashlib.sha256()
        for layer in self.layers:
            data = layer.ids if layer.ids is not None else layer.counts
            assert data is not None
            head = json.dumps([layer.number, layer.calls, data.dtype.str, data.shape])
            digest.update(head.encode())
            digest.update(np.ascontiguousarray(data).data)
        return digest.hexdigest()[:_HASH_CHARACTERS]

    @property
    def routing(self) -> str:
        """What `Problem.routing` says of it."""
        return PREFIX + self.identifier

    def on_rank(self, ranks: int, rank: int) -> Recording:
        """What one rank of expert parallelism sees: its own experts from 0 on, the others NOWHERE.

        A rank holds one stretch of the global numbers (sglang 0.5.23 wheel,
        srt/layers/moe/token_dispatcher/standard.py:StandardDispatcher.dispatch).

        Raises:
            InputError: when the experts cannot be spread evenly over so many ranks.
        """
        if ranks < 1 or not 0 <= rank < ranks:
            raise InputError(f"there is no rank {rank} among {ranks}", "ranks count from 0: --ep 4 --rank 3")
        if self.experts % ranks:
            raise InputError(
                f"{self.experts} experts cannot be spread over {ranks} ranks",
                "give their true number with --experts",
            )
        here = self.experts // ranks
        first = rank * here
        layers = []
        for layer in self.layers:
            if layer.ids is not None:
                own = (layer.ids >= first) & (layer.ids < first + here)
                ids = np.where(own, layer.ids - first, NOWHERE).astype(np.int32)
                layers.append(replace(layer, ids=ids))
            else:
                assert layer.counts is not None
                layers.append(replace(layer, counts=layer.counts[:, first : first + here]))
        return replace(self, experts=here, layers=tuple(layers))

    def to_bytes(self) -> bytes:
        """As a plain npz file; the same recording gives the same bytes.

        Raises:
            InputError: where only counts are known.
        """
        if not self.has_ids:
            raise InputError("this recording has counts only: which experts a token went to is not known")
        arrays = [layer.ids for layer in self.layers if layer.ids is not None]
        buffer = io.BytesIO()
        np.savez(
            buffer,
            ids=np.concatenate(arrays).astype(np.int32),
            layers=np.array([layer.number for layer in self.layers], dtype=np.int64),
            calls_of_layer=np.array([len(layer.calls) for layer in self.layers], dtype=np.int64),
            calls=np.array([tokens for layer in self.layers for tokens in layer.calls], dtype=np.int64),
            experts=np.array([self.experts, self.experts_known], dtype=np.int64),
        )
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, source: str) -> Recording:
        """Read what `to_bytes` wrote.

        Raises:
            InputError: for anything else.
        """
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as file:
                names = ("ids", "layers", "calls_of_layer", "calls", "experts")
                ids, layers, calls_of_layer, calls, experts = (file[name] for name in names)
            return _rebuilt(ids, layers, calls_of_layer, calls, experts)
        except _DAMAGE as error:
            raise InputError(
                f"{printable(source, 400)} is no recording of moetune: {printable(str(error), 120)}",
                "name the files it was made from once more with --routing",
            ) from error


def _rebuilt(
    ids: IdArray, layers: IntArray, calls_of_layer: IntArray, calls: IntArray, experts: IntArray
) -> Recording:
    if ids.dtype != np.int32 or ids.ndim != 2 or ids.size > MAX_IDS:
        raise ValueError("its ids are no table of experts")
    if any(sizes.dtype != np.int64 or sizes.ndim != 1 for sizes in (layers, calls_of_layer, calls, experts)):
        raise ValueError("its lengths are none")
    if len(layers) != len(calls_of_layer) or calls.min() < 1 or calls_of_layer.min() < 1:
        raise ValueError("a layer of it has no tokens")
    if calls_of_layer.sum() != len(calls) or calls.sum() != len(ids):
        raise ValueError("its lengths contradict one another")
    number, known = (int(value) for value in experts)
    check_ids(ids, number)
    ends_of_calls = np.concatenate([[0], np.cumsum(calls_of_layer)]).tolist()
    found, row = [], 0
    for place, layer in enumerate(layers.tolist()):
        own = tuple(calls[ends_of_calls[place] : ends_of_calls[place + 1]].tolist())
        found.append(RecordedLayer(layer, ids[row : row + sum(own)], own))
        row += sum(own)
    return Recording("topk_ids", number, bool(known), tuple(found))


def count_ids(ids: IdArray | None, experts: int) -> IntArray:
    """Slots of each expert: `[experts]`; what is NOWHERE counts for none."""
    assert ids is not None
    counted: IntArray = np.bincount(ids.reshape(-1) + 1, minlength=experts + 1)[1 : experts + 1]
    return counted


def check_ids(ids: NDArray[np.integer[Any]], experts: int) -> None:
    """Refuse what is no number of an expert.

    Raises:
        ValueError: naming it.
    """
    if not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(f"{experts} is no number of experts")
    if not ids.size:
        return
    least, most = int(ids.min()), int(ids.max())
    if least < NOWHERE or most >= experts:
        raise ValueError(f"expert {least if least < NOWHERE else most} is none of the {experts}")


def join_calls(number: int, calls: list[IdArray]) -> RecordedLayer | None:
    """A layer from the ids of its calls: rows and columns in which nothing was written are left out.

    SGLang's recorder has 8 columns whatever the model's topk is, and marks padded tokens with -1
    (sglang 0.5.23 wheel, srt/eplb/expert_distribution.py:_DetailSinglePassGatherer and
    srt/layers/moe/topk.py:_mask_topk_ids_padded_region).

    Returns:
        None where nothing was written at all, as in a dense layer.
    """
    written = [ids[(ids != NOWHERE).any(axis=1)] for ids in calls]
    written = [ids for ids in written if len(ids)]
    if not written:
        return None
    used = max(int(np.flatnonzero((ids != NOWHERE).any(axis=0))[-1]) + 1 for ids in written)
    ids = np.concatenate([call[:, :used] for call in written]).astype(np.int32)
    return RecordedLayer(number, ids, tuple(len(call) for call in written))
