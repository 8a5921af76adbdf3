"""The process that opens `.pt` files of other people: it can do nothing but say numbers.

`python -m moetune.measure.routing_reader BYTES DESCRIPTOR...` gets the files as open descriptors. Torch is
imported and used once; then, before a byte of them is read, the process gives up opening files and sockets
(RLIMIT_NOFILE 0), writing to files (RLIMIT_FSIZE 0), starting processes, and all memory and processor time
beyond what the files can need. They are read by `torch.load(weights_only=True)`, which runs no code of a
pickle, and only as archives that torch.save writes: entries that are stored, not compressed, and together
no larger than the file. What comes out are the frames of `routing_frames`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import resource
import sys
import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from moetune.domain.recording import MAX_EXPERTS, MAX_IDS, MAX_LAYERS, MAX_TOPK, NOWHERE
from moetune.domain.text import printable
from moetune.measure.routing_frames import MAX_COUNTS, Frame, frame_bytes, note_bytes

OLDEST_TORCH = (2, 6)
"""Older ones run code of some files in spite of weights_only (CVE-2025-32434)."""
MAX_ENTRIES = 1 << 18
MAX_RECORDS = 1 << 17
_MAX_PICKLE_BYTES = 256 << 20
_CPU_SECONDS = 120
_NOBODY = 65534
_ASKS_FOR = re.compile(r"GLOBAL ([\w.]{1,120})")


class Unreadable(Exception):  # noqa: N818 - an answer, not a fault
    """Why a file is refused."""


def main(arguments: list[str]) -> int:
    """Read the descriptors."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else prints
    memory, descriptors = int(arguments[0]), [int(text) for text in arguments[1:]]
    try:
        torch = _torch()
    except Unreadable as why:
        answers.write(note_bytes("torch", why=str(why)))
        answers.flush()
        return 0
    files = [os.fdopen(descriptor, "rb") for descriptor in descriptors]
    _give_up(memory)
    refused = any(_refuses(torch, number, file, answers) for number, file in enumerate(files))
    if not refused:
        answers.write(note_bytes("done"))
    answers.flush()
    return 0


def _refuses(torch: Any, number: int, file: io.BufferedReader, answers: io.BufferedWriter) -> bool:  # noqa: ANN401
    """Hand over a file; whether it had to be refused."""
    try:
        for frame in _frames(torch, number, file):
            answers.write(frame_bytes(frame))
    except Exception as error:  # noqa: BLE001 - whatever a hostile file causes is told to who asked
        why = str(error) if isinstance(error, Unreadable) else _why(error)
        answers.write(note_bytes("refused", file=number, why=why))
        return True
    finally:
        file.close()
    return False


def _torch() -> Any:  # noqa: ANN401 - torch has no types here
    """Torch, with all imported that loading needs."""
    try:
        import torch
    except Exception as error:
        raise Unreadable(f"torch cannot be imported: {type(error).__name__}") from error
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found is None or (int(found[1]), int(found[2])) < OLDEST_TORCH:
        raise Unreadable(f"torch {printable(torch.__version__, 40)} is too old")
    torch.set_num_threads(1)
    buffer = io.BytesIO()
    torch.save({"a": [torch.zeros(2, 2, dtype=torch.int64)]}, buffer)
    buffer.seek(0)
    with zipfile.ZipFile(buffer) as archive:
        archive.infolist()
    buffer.seek(0)
    _plain(torch, torch.load(buffer, weights_only=True, map_location="cpu")["a"][0], 2, MAX_IDS)
    # What an error needs is imported by one.
    with contextlib.suppress(Exception):
        torch.load(io.BytesIO(b"PK"), weights_only=True, map_location="cpu")
    return torch


def _give_up(memory: int) -> None:
    """Give up all that reading does not need.

    Args:
        memory: bytes beyond those that are in use.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    limits = {
        resource.RLIMIT_CPU: int(used.ru_utime + used.ru_stime) + _CPU_SECONDS,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
        # Those that are open stay so; none can be added.
        resource.RLIMIT_NOFILE: 0,
    }
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - the last file that is opened
        pages = int(file.read().split()[0])
    limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + memory
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    if os.geteuid() == 0:
        # Root could raise the limits again; a sandbox without other users has no root that could.
        with contextlib.suppress(OSError):
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)


def _frames(torch: Any, number: int, file: io.BufferedReader) -> Iterator[Frame]:  # noqa: ANN401
    _check_archive(file)
    file.seek(0)
    content = torch.load(file, weights_only=True, map_location="cpu")
    if isinstance(content, torch.Tensor):
        yield Frame(number, "ids", _ids(torch, content, 2))
    elif type(content) is dict and "records" in content:
        yield from _records(torch, number, content)
    elif type(content) is dict and "logical_count" in content:
        counts = _plain(torch, content["logical_count"], 3, MAX_COUNTS)
        yield Frame(number, "stat", _counts(counts), experts=counts.shape[2])
    else:
        raise Unreadable("it holds neither a tensor nor what SGLang's recorder writes")


def _check_archive(file: io.BufferedReader) -> None:
    """Refuse what torch.save did not write, and what would grow."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if file.read(4) != b"PK\x03\x04":
        raise Unreadable("it is no archive of torch.save; of releases before torch 1.6 none is read")
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise Unreadable("its archive is damaged, or cut off") from error
    if len(entries) > MAX_ENTRIES:
        raise Unreadable(f"its archive has {len(entries):,} entries")
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries):
        raise Unreadable("its archive is compressed, which torch.save never does")
    if sum(max(entry.file_size, entry.compress_size) for entry in entries) > size:
        raise Unreadable("its archive says that it holds more than it is large")
    if any(e.file_size > _MAX_PICKLE_BYTES for e in entries if e.filename.endswith(".pkl")):
        raise Unreadable("its pickle is too large")


def _records(torch: Any, number: int, content: dict[str, Any]) -> Iterator[Frame]:  # noqa: ANN401
    """The records of the recorder's modes per_pass and per_token (sglang 0.4.9 to 0.5.23 wheels)."""
    records = content["records"]
    if type(records) is not list or len(records) > MAX_RECORDS:
        raise Unreadable("its records are no list, or too many")
    placement = content.get("last_physical_to_logical_map")
    known = 0
    if isinstance(placement, torch.Tensor):
        known = _plain(torch, placement, 2, MAX_COUNTS).shape[1]
    ids_left, counts_left = MAX_IDS, MAX_COUNTS
    for record in records:
        if type(record) is not dict:
            raise Unreadable("a record of it is no dictionary")
        of = {
            "file": number,
            "forward_pass": _whole(record.get("forward_pass_id", 0)),
            "rank": _whole(record.get("rank", 0)),
        }
        counts = record.get("global_physical_count")
        if record.get("topk_ids_of_layer") is not None:
            ids = _ids(torch, record["topk_ids_of_layer"], 3, ids_left)
            ids_left -= ids.size
            known = known or (_plain(torch, counts, 2, counts_left).shape[1] if counts is not None else 0)
            yield Frame(kind="detail", data=ids, experts=known, **of)
        elif counts is not None:
            table = _counts(_plain(torch, counts, 2, counts_left))
            counts_left -= table.size
            yield Frame(kind="pass", data=table, experts=table.shape[1], **of)
        else:
            raise Unreadable("a record of it has neither experts nor counts")


def _plain(torch: Any, tensor: Any, dimensions: int, room: int) -> Any:  # noqa: ANN401
    """A tensor as numbers: whole ones, of a shape that a recording has."""
    if type(tensor) is not torch.Tensor:
        raise Unreadable("where a tensor should be there is none")
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise Unreadable("a tensor of it is no plain one")
    if tensor.dtype not in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8):
        raise Unreadable(
            f"a tensor of it holds {str(tensor.dtype).removeprefix('torch.')}, not whole numbers"
        )
    if tensor.dim() != dimensions:
        raise Unreadable(f"a tensor of it has {tensor.dim()} dimensions where there should be {dimensions}")
    if tensor.numel() > room:
        raise Unreadable(f"a tensor of it has {tensor.numel():,} numbers, {room:,} at most are read")
    # A view can be larger than what is stored, since a stride can be 0.
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise Unreadable("a tensor of it is larger than what is stored of it")
    return tensor.numpy()


def _ids(torch: Any, tensor: Any, dimensions: int, room: int = MAX_IDS) -> Any:  # noqa: ANN401
    found = _plain(torch, tensor, dimensions, room)
    if found.shape[-1] > MAX_TOPK or not found.shape[-1]:
        raise Unreadable(f"{found.shape[-1]:,} experts of a token are none or too many")
    if dimensions == 3 and found.shape[0] > MAX_LAYERS:
        raise Unreadable(f"{found.shape[0]:,} layers are too many")
    if found.size and (int(found.min()) < NOWHERE or int(found.max()) >= MAX_EXPERTS):
        raise Unreadable(f"its numbers go from {found.min()} to {found.max()}: they are no experts")
    return found.astype(np.int32)


def _counts(found: Any) -> Any:  # noqa: ANN401
    if found.shape[-1] > MAX_EXPERTS or found.shape[-2] > MAX_LAYERS or not found.shape[-1]:
        raise Unreadable("its counts are of too many layers or experts, or of none")
    if found.size and int(found.min()) < 0:
        raise Unreadable("a count of it is negative")
    return found.astype(np.int64)


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise Unreadable("a number of a record is none")
    return value


def _why(error: Exception) -> str:
    """One line of what a file caused."""
    text = str(error)
    asks = _ASKS_FOR.search(text)
    if asks is not None:
        return f"its pickle asks for {asks[1]}: it holds code or objects, not numbers"
    if isinstance(error, MemoryError) or "alloc" in text.lower():
        return "it needs more memory than its size allows"
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    return printable(f"torch cannot read it: {type(error).__name__}: {lines[0]}", 200)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
