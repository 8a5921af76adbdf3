"""What the process that reads recordings hands over: plain numbers, each array behind a line that says it.

A frame is one line of JSON and then exactly as many bytes as it says. Nothing here imports torch: it is
the side that starts the process, and believes nothing that comes back unlooked at.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from moetune.domain.recording import MAX_EXPERTS, MAX_IDS, MAX_LAYERS, MAX_TOPK, check_ids

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_FILE_BYTES = 2 << 30
MAX_COUNTS = 1 << 26
"""Numbers in a table of counts: 1,000 passes of 61 layers with 512 experts are half of it."""
MAX_LINE = 4096

Kind = Literal["ids", "detail", "pass", "stat"]
_TYPES: dict[str, Any] = {"ids": np.int32, "detail": np.int32, "pass": np.int64, "stat": np.int64}
_DIMENSIONS = {"ids": 2, "detail": 3, "pass": 2, "stat": 3}


@dataclass(frozen=True, slots=True)
class Frame:
    """One array of a file.

    Attributes:
        file: place of the file among those that were asked for.
        kind: `ids` `[tokens, topk]` of a file of SGLang's tuner; of its recorder `detail`
            `[layers, tokens, columns]`, `pass` `[layers, experts]` counts of one forward pass, `stat`
            `[passes, layers, experts]`.
        data: the numbers.
        forward_pass: number of the forward pass; 0 where there is none.
        rank: of the process that recorded it.
        experts: global experts as far as the file says; 0 where it does not.
    """

    file: int
    kind: Kind
    data: NDArray[Any]
    forward_pass: int = 0
    rank: int = 0
    experts: int = 0


def frame_bytes(frame: Frame) -> bytes:
    """A frame on its way."""
    data = np.ascontiguousarray(frame.data, dtype=_TYPES[frame.kind])
    head = {
        "file": frame.file,
        "kind": frame.kind,
        "shape": list(data.shape),
        "forward_pass": frame.forward_pass,
        "rank": frame.rank,
        "experts": frame.experts,
    }
    return json.dumps(head).encode() + b"\n" + data.astype(data.dtype.newbyteorder("<")).tobytes()


def note_bytes(note: str, **values: Any) -> bytes:  # noqa: ANN401 - JSON values
    """A line without an array: `done`, `torch`, `refused`."""
    return json.dumps({"note": note, **values}).encode() + b"\n"


def read_frame(head: dict[str, Any], read: Callable[[int], bytes], files: int, room: int) -> Frame:
    """Read the array behind a line.

    Args:
        head: the line.
        read: gives exactly so many bytes.
        files: how many files were asked for.
        room: numbers that may still come.

    Raises:
        ValueError: for what no honest reader sends.
    """
    kind, shape = head.get("kind"), head.get("shape")
    if kind not in _DIMENSIONS or not isinstance(shape, list) or len(shape) != _DIMENSIONS[kind]:
        raise ValueError("a frame of no kind")
    sizes = [_whole(size, 0, 1 << 31) for size in shape]
    numbers = 1
    for size in sizes:
        numbers *= size
    if numbers > room:
        raise ValueError("more numbers than may come")
    counts = kind in ("pass", "stat")
    if sizes[-1] > (MAX_EXPERTS if counts else MAX_TOPK) or _layers(kind, sizes) > MAX_LAYERS:
        raise ValueError("a shape that no recording has")
    kind_of_number = np.dtype(_TYPES[kind]).newbyteorder("<")
    data = np.frombuffer(read(numbers * kind_of_number.itemsize), dtype=kind_of_number).reshape(sizes)
    if counts:
        if data.size and (int(data.min()) < 0 or int(data.max()) > 1 << 48):
            raise ValueError("counts that are none")
    else:
        check_ids(data, MAX_EXPERTS)
    return Frame(
        file=_whole(head.get("file"), 0, files - 1),
        kind=kind,
        data=data,
        forward_pass=_whole(head.get("forward_pass"), 0, 1 << 62),
        rank=_whole(head.get("rank"), 0, 1 << 20),
        experts=_whole(head.get("experts"), 0, MAX_EXPERTS),
    )


def _layers(kind: str, sizes: list[int]) -> int:
    return {"ids": 1, "stat": sizes[1]}.get(kind, sizes[0])


def _whole(value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError("a number that is none")
    return value


def fresh_room() -> dict[str, int]:
    """How many numbers of each kind are taken in all."""
    return {"ids": MAX_IDS, "counts": MAX_COUNTS}
