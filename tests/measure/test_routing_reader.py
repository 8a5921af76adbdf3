"""`.pt` files of other people attack the process that reads them: nothing but numbers comes out."""

from __future__ import annotations

import io
import json
import os
import pickle
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moetune.applications.routing_process import OpenFile, read_files
from moetune.domain.errors import InputError
from moetune.measure import routing_reader
from moetune.measure.routing_frames import Frame, frame_bytes, fresh_room, read_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from moetune.measure.routing_frames import Kind


class Evil:
    """A pickle that would run a command."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._path}",)


def saved(content: object, **more: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **more)
    return buffer.getvalue()


def handed_over(content: bytes, tmp_path: Path) -> tuple[list[tuple[Any, ...]], str]:
    """What the reader says of a file in this process, without its limits: arrays, and why it was refused."""
    path = tmp_path / "file.pt"
    path.write_bytes(content)
    stream = io.BytesIO()
    with path.open("rb") as file:
        answers: Any = stream
        routing_reader._refuses(torch, 0, file, answers)
    stream.seek(0)
    frames: list[tuple[Any, ...]] = []
    while line := stream.readline():
        head = json.loads(line)
        if "note" in head:
            return frames, head["why"]
        frame = read_frame(head, stream.read, 1, 1 << 20)
        frames.append((frame.kind, frame.data.tolist(), frame.experts))
    return frames, ""


def refusal(content: object, tmp_path: Path, **more: Any) -> str:
    data = content if isinstance(content, bytes) else saved(content, **more)
    frames, why = handed_over(data, tmp_path)
    assert not frames
    assert why
    return why


def test_a_tensor_is_handed_over(tmp_path: Path) -> None:
    for kind in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8):
        frames, why = handed_over(saved(torch.tensor([[1, 2], [3, 0]], dtype=kind)), tmp_path)
        assert (frames, why) == ([("ids", [[1, 2], [3, 0]], 0)], "")


def test_a_view_is_handed_over_as_what_it_shows(tmp_path: Path) -> None:
    """`topk_ids[:, :6]` is saved with all of its storage."""
    frames, _ = handed_over(saved(torch.arange(24).reshape(3, 8)[:, :2]), tmp_path)
    assert frames == [("ids", [[0, 1], [8, 9], [16, 17]], 0)]


TENSORS: dict[str, tuple[Callable[[], object], str]] = {
    "floats": (lambda: torch.rand(3, 2), "float32, not whole numbers"),
    "not a number": (lambda: torch.full((3, 2), float("nan")), "float32"),
    "truth values": (lambda: torch.ones(3, 2, dtype=torch.bool), "bool"),
    "complex": (lambda: torch.ones(3, 2, dtype=torch.complex64), "complex64"),
    "an expert below -1": (lambda: torch.tensor([[1, -2]]), "from -2 to 1"),
    "an expert beyond all": (lambda: torch.tensor([[1, 1 << 16]]), "from 1 to 65536"),
    "an expert that wraps": (lambda: torch.tensor([[(1 << 32) + 3]]), "no experts"),
    "one dimension": (lambda: torch.arange(4), "1 dimensions"),
    "no dimension": (lambda: torch.tensor(3), "0 dimensions"),
    "three dimensions": (lambda: torch.zeros(2, 2, 2, dtype=torch.int32), "3 dimensions"),
    "no column": (lambda: torch.zeros(3, 0, dtype=torch.int32), "none or too many"),
    "too many columns": (lambda: torch.zeros(1, 129, dtype=torch.int32), "none or too many"),
    "sparse": (lambda: torch.ones(3, 2, dtype=torch.int32).to_sparse(), "no plain one"),
    "on no device": (lambda: torch.zeros(3, 2, dtype=torch.int32, device="meta"), "no plain one"),
    "a larger view": (
        lambda: torch.zeros(1, dtype=torch.int64).expand(1 << 20, 8),
        "larger than what is stored",
    ),
    "a view without end": (lambda: torch.zeros(1, dtype=torch.int64).expand(1 << 40, 8), "at most are read"),
    "a parameter": (lambda: torch.nn.Parameter(torch.zeros(2, 2)), "there is none"),
    "a list": (lambda: [1, 2], "neither a tensor nor"),
    "another dictionary": (lambda: {"model": torch.zeros(2, 2)}, "neither a tensor nor"),
    "records that are none": (lambda: {"records": {}}, "no list"),
    "a record that is none": (lambda: {"records": [3]}, "no dictionary"),
    "an empty record": (lambda: {"records": [{}]}, "neither experts nor counts"),
    "experts that are a list": (lambda: {"records": [{"topk_ids_of_layer": [1]}]}, "there is none"),
    "a pass that is no number": (
        lambda: {
            "records": [{"forward_pass_id": "x", "global_physical_count": torch.zeros(2, 2, dtype=int)}]
        },
        "is none",
    ),
    "a negative count": (lambda: {"logical_count": torch.full((1, 2, 4), -1)}, "negative"),
    "counts that are floats": (lambda: {"logical_count": torch.ones(1, 2, 4)}, "float32"),
    "counts of no expert": (lambda: {"logical_count": torch.zeros(1, 2, 0, dtype=torch.int32)}, "of none"),
    "counts of one dimension": (lambda: {"logical_count": torch.arange(4)}, "1 dimensions"),
}


@pytest.mark.parametrize("name", sorted(TENSORS))
def test_what_is_no_recording_is_refused(name: str, tmp_path: Path) -> None:
    make, why = TENSORS[name]
    assert why in refusal(make(), tmp_path)


def test_code_is_not_run(tmp_path: Path) -> None:
    target = tmp_path / "written"
    for content in (Evil(target), {"records": [Evil(target)]}, [torch.zeros(2, 2), Evil(target)]):
        assert "asks for posix.system: it holds code" in refusal(content, tmp_path)
    assert not target.exists()


def test_a_bare_pickle_is_not_even_unpacked(tmp_path: Path) -> None:
    target = tmp_path / "written"
    assert "no archive of torch.save" in refusal(pickle.dumps(Evil(target)), tmp_path)
    old = saved(torch.zeros(2, 2, dtype=torch.int32), _use_new_zipfile_serialization=False)
    assert "no archive of torch.save" in refusal(old, tmp_path)
    assert not target.exists()


def archive(entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as made:
        for name, content in entries.items():
            made.writestr(name, content)
    return buffer.getvalue()


def test_what_would_grow_is_refused(tmp_path: Path) -> None:
    bomb = archive({"archive/data.pkl": bytes(64 << 20)}, zipfile.ZIP_DEFLATED)
    assert len(bomb) < 1 << 20
    assert "compressed" in refusal(bomb, tmp_path)


def test_entries_that_lie_on_one_another_are_refused(tmp_path: Path) -> None:
    """A directory that names the same bytes many times says more than the file is large."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        made.writestr("archive/data/0", bytes(1 << 16))
        first = made.filelist[0]
        made.filelist += [first] * 50
    assert "more than it is large" in refusal(buffer.getvalue(), tmp_path)


def test_what_is_cut_off_is_refused(tmp_path: Path) -> None:
    whole = saved(torch.zeros(50, 8, dtype=torch.int32))
    for length in (0, 3, 4, 100, len(whole) // 2, len(whole) - 1):
        assert refusal(whole[:length], tmp_path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_refused_or_read_as_numbers(data: st.DataObject, tmp_path: Path) -> None:
    content = bytearray(saved(torch.arange(12, dtype=torch.int32).reshape(6, 2)))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    frames, why = handed_over(bytes(content), tmp_path)
    assert bool(frames) != bool(why)
    for kind, rows, _ in frames:
        assert kind == "ids"
        assert all(-1 <= expert < 1 << 16 for row in rows for expert in row)


# --- frames: the side that asked believes nothing ----------------------------------------------------

HONEST = Frame(0, "ids", np.array([[1, 2]], dtype=np.int32))


def received(head: dict[str, Any], data: bytes) -> Frame:
    return read_frame(head, io.BytesIO(data).read, 2, 1 << 16)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "objects"},
        {"kind": ["ids"]},
        {"kind": None},
        {"shape": [2]},
        {"shape": [1, 2, 1]},
        {"shape": [-1, 2]},
        {"shape": [1.0, 2]},
        {"shape": [True, 2]},
        {"shape": "12"},
        {"shape": [1 << 20, 2]},
        {"shape": [1, 200]},
        {"file": 2},
        {"file": -1},
        {"file": "0"},
        {"rank": -1},
        {"experts": 1 << 20},
        {"forward_pass": None},
    ],
)
def test_a_line_that_is_none_is_refused(change: dict[str, Any]) -> None:
    line, _, data = frame_bytes(HONEST).partition(b"\n")
    assert received(json.loads(line), data).data.tolist() == [[1, 2]]
    with pytest.raises((ValueError, TypeError)):
        received({**json.loads(line), **change}, data)


def test_numbers_that_are_no_experts_are_refused_by_who_asked_too() -> None:
    for kind, numbers in (
        ("ids", [[1, 1 << 17]]),
        ("ids", [[-2, 0]]),
        ("pass", [[-1, 0]]),
        ("pass", [[1 << 50]]),
    ):
        of: Kind = kind  # type: ignore[assignment]
        line, _, data = frame_bytes(Frame(0, of, np.array(numbers))).partition(b"\n")
        with pytest.raises(ValueError, match=r"expert|counts"):
            received(json.loads(line), data)


# --- the process: what it could do if torch had a hole -----------------------------------------------

_HOLE = """
import sys
if any("routing_reader" in argument for argument in sys.orig_argv):
    import torch
    honest, calls = torch.load, []
    def load(file, **more):
        calls.append(more)
        if len(calls) <= 2:  # what the reader does with files of its own, before it gives up anything
            return honest(file, **more)
        {attack}
    torch.load = load
"""


def interpreter(folder: Path, code: str) -> str:
    """An interpreter in which some code runs first."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(code)
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}/site:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return str(path)


def read(folder: Path, attack: str, seconds: float = 60.0) -> str:
    """What comes of reading an honest file while torch does something else; why it was refused."""
    python = interpreter(folder, _HOLE.format(attack=attack.replace("\n", "\n        ")))
    path = folder / "honest.pt"
    path.write_bytes(saved(torch.zeros(2, 2, dtype=torch.int32)))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        files = [OpenFile("honest.pt", descriptor, path.stat().st_size)]
        with pytest.raises(InputError) as caught:
            list(read_files(files, fresh_room(), python, wall_seconds=seconds))
    finally:
        os.close(descriptor)
    return str(caught.value.message)


ATTACKS = {
    "opens a file": ("open({target!r}, 'w').write('x')", "Too many open files"),
    "reads a file": ("open('/etc/passwd').read()", "Too many open files"),
    "makes a socket": ("import socket; socket.socket().connect(('127.0.0.1', {port}))", "refused"),
    "starts a program": ("import os; os.execv('/bin/sh', ['sh', '-c', 'echo x > {target}'])", "ended"),
    "starts a process": (
        "import os; os.fork() or os._exit(0); raise OSError('forked')",
        "temporarily unavailable",
    ),
    "takes memory": ("bytearray(4 << 30)", "more memory than its size allows"),
    "dies": ("import os; os._exit(0)", "ended"),
    "is killed": ("import os; os.kill(os.getpid(), 9)", "ended with signal 9"),
    "answers what it was not asked": ("import os; os.write(3, b'x' * 9000); os._exit(0)", "ended"),
}


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_even_code_that_ran_could_do_nothing(name: str, tmp_path: Path) -> None:
    attack, why = ATTACKS[name]
    target = tmp_path / "written"
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.settimeout(0.2)
        attack = attack.format(target=str(target), port=listening.getsockname()[1])
        assert why in read(tmp_path, attack)
        with pytest.raises(TimeoutError):
            listening.accept()
    assert not target.exists()


def test_a_reader_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    assert "took more than 8 s" in read(tmp_path, "import time; time.sleep(1000)", seconds=8.0)
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert not [line for line in left.splitlines() if str(tmp_path) in line]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise ImportError", "torch cannot be imported"),
        ("__version__ = '2.5.1'", "torch 2.5.1 is too old"),
        ("__version__ = 'x'", "torch x is too old"),
    ],
)
def test_without_a_torch_that_is_new_enough_nothing_is_read(code: str, why: str, tmp_path: Path) -> None:
    from moetune.applications.routing_process import NoTorchError

    python = interpreter(tmp_path, "")
    (tmp_path / "site" / "torch.py").write_text(code)
    path = tmp_path / "honest.pt"
    path.write_bytes(saved(torch.zeros(2, 2, dtype=torch.int32)))
    with path.open("rb") as file, pytest.raises(NoTorchError, match=why) as caught:
        list(read_files([OpenFile("honest.pt", file.fileno(), 500)], fresh_room(), python))
    assert "--python" in str(caught.value.hint)
