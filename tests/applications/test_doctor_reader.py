"""Logs as streams: files, pipes, gzip, limits, and what is no log at all."""

from __future__ import annotations

import gzip
import io
import os
import threading
from typing import TYPE_CHECKING

import pytest

from moetune.applications import doctor_reader
from moetune.applications.doctor_reader import CHUNK, OVERLAP, Hit, HitReader, LogSource
from moetune.domain.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

NEEDLES = (b"NEEDLE",)
ORDINARY = (
    "[2026-12-01 12:00:00 TP0] Decode batch, #running-req: 4, #token: 90, token usage: 0.01, "
    "cuda graph: True, gen throughput (token/s): 100.12, #queue-req: 0\n"
    '[2026-12-01 12:00:00] INFO:     127.0.0.1:30000 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
    "(APIServer pid=7) INFO 12-01 12:00:00 [loggers.py:127] Engine 000: Avg prompt throughput: 1.0 tokens/s\n"
)


def read(data: bytes, name: str = "a.log") -> tuple[LogSource, list[Hit]]:
    """Everything that a stream gives."""
    found = list(HitReader(NEEDLES).read(name, io.BytesIO(data)))
    return found[-1][0], [hit for _, hit in found if hit is not None]


def test_hits_have_their_line_numbers() -> None:
    source, hits = read(b"one\ntwo NEEDLE\nthree\nNEEDLE four")
    assert [(hit.number, hit.line.text) for hit in hits] == [(2, "two NEEDLE"), (4, "NEEDLE four")]
    assert source.lines == 4


def test_line_numbers_hold_over_many_chunks_of_ordinary_lines() -> None:
    lines = ORDINARY.encode() * (3 * CHUNK // len(ORDINARY))
    count = lines.count(b"\n")
    source, hits = read(lines + b"x NEEDLE\n" + lines + b"y NEEDLE\n")
    assert [hit.number for hit in hits] == [count + 1, 2 * count + 2]
    assert source.lines == 2 * count + 2
    assert source.size_bytes == 2 * len(lines) + 18


@pytest.mark.parametrize("shift", range(-8, 9))
def test_a_needle_on_the_edge_of_a_chunk_is_found_once(shift: int) -> None:
    for edge in (CHUNK, CHUNK - OVERLAP, 4096):
        filler = b"some other line of text\n" * (edge // 24 + 1)
        data = filler[: edge + shift] + b"NEEDLE\n" + filler
        _, hits = read(data)
        assert len(hits) == 1, (edge, shift)


@pytest.mark.parametrize("shift", range(-8, 9))
def test_a_needle_on_the_edge_of_a_piece_of_an_endless_line_is_found(shift: int) -> None:
    for edge in (4096, CHUNK, CHUNK - OVERLAP, 2 * CHUNK - OVERLAP):
        _, hits = read(b"x" * (edge + shift) + b"NEEDLE" + b"y" * (2 * CHUNK))
        assert hits, (edge, shift)


def test_ordinary_lines_are_passed_over_whatever_they_hold() -> None:
    _, hits = read(ORDINARY.replace("gen throughput", "NEEDLE throughput").encode() + b"NEEDLE\n")
    assert [hit.number for hit in hits] == [4]


def test_lines_around_a_hit_are_at_hand() -> None:
    _, (hit,) = read(b"a\nb\nNEEDLE\nc\nd\n")
    assert [line.text for line in hit.before] == ["a", "b"]
    assert [line.text for line in hit.after[:2]] == ["c", "d"]


def test_case_8_gzip_also_of_several_members(tmp_path: Path) -> None:
    data = gzip.compress(b"x\nNEEDLE\n") + gzip.compress(b"NEEDLE again\n")
    source, hits = read(data)
    assert [hit.number for hit in hits] == [2, 3]
    assert not source.problems
    path = tmp_path / "server.log.gz"
    path.write_bytes(data)
    assert sum(hit is not None for _, hit in HitReader(NEEDLES).read(str(path))) == 2


def test_truncated_and_damaged_gzip_give_what_they_have_and_say_so() -> None:
    text = b"NEEDLE\n" + os.urandom(100_000).hex().encode() + b"\n"
    whole = gzip.compress(text)
    source, hits = read(whole[: len(whole) // 2])
    assert len(hits) == 1
    assert source.problems == ["its gzip data is cut off"]
    broken = bytearray(whole)
    broken[len(whole) // 2] ^= 0xFF
    source, hits = read(bytes(broken))
    assert len(hits) == 1
    assert source.problems
    source, hits = read(whole + b"trailing rubbish")
    assert len(hits) == 1
    assert "no gzip data follows" in source.problems[0]


def test_a_gzip_bomb_ends_at_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = gzip.compress(b"NEEDLE\n" + b"\n" * (100 << 20))
    source, hits = read(bomb)
    assert len(hits) == 1
    assert "expands to more than" in source.problems[0]
    assert source.size_bytes < 70 << 20
    # Text that repeats itself as logs do is no bomb, but has a limit of its own.
    monkeypatch.setattr(doctor_reader, "MAX_EXPANDED", 3 << 20)
    source, _ = read(gzip.compress((ORDINARY * 40_000).encode()))
    assert "expands to more than" in source.problems[0]


def test_lines_of_10_mb_are_read_in_pieces() -> None:
    filler = b"0123456789abcdef" * (10 << 16)
    _, hits = read(b"first\n" + filler + b" NEEDLE " + filler + b"\nNEEDLE last\n")
    assert [hit.number for hit in hits] == [2, 3]
    assert all(len(hit.line.text) < 200_000 for hit in hits)


def test_memory_does_not_grow_with_the_log() -> None:
    """A hundred megabytes pass through a buffer of a few."""
    import tracemalloc

    chunk = (ORDINARY * 8000).encode()

    class Endless(io.BytesIO):
        left = 100 << 20

        def read(self, size: int | None = -1, /) -> bytes:
            self.left -= len(chunk)
            return chunk if self.left > 0 and size else b""

    tracemalloc.start()
    list(HitReader(NEEDLES).read("a.log", Endless()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12 << 20


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"\x7fELF\x02\x01\x01" + bytes(range(256)) * 40, "binary"),
        (os.urandom(5000), "binary"),
        (b"\0" * 5000, "zero bytes"),
        (b"\x28\xb5\x2f\xfd rest", "zstd"),
        (b"\xfd7zXZ\x00 rest", "xz"),
        (b"PK\x03\x04 rest", "zip"),
    ],
)
def test_what_is_no_log_is_a_clear_error(data: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(data)


def test_what_is_odd_but_a_log_is_read() -> None:
    # The hole that copytruncate leaves; UTF-16 of a PowerShell redirection; invalid UTF-8.
    assert len(read(b"\0" * 5000 + b"x\nNEEDLE\n" * 2000)[1]) == 2000
    assert len(read("\ufeffx\r\nNEEDLE\r\n".encode("utf-16-le"))[1]) == 1
    assert len(read("\ufeffNEEDLE\n".encode("utf-16-be"))[1]) == 1
    assert read(b"caf\xe9 and other text NEEDLE\n")[1][0].line.text == "caf\ufffd and other text NEEDLE"


def test_docker_and_cri_pieces_are_put_together() -> None:
    cri = b"".join(
        b"2026-12-01T10:00:00.1Z stderr %s %s\n" % (flag, piece)
        for flag, piece in ((b"P", b"NEED"), (b"P", b"LE-a "), (b"F", b"NEEDLE end"), (b"F", b"next"))
    )
    _, hits = read(cri)
    assert hits[0].line.text == "NEEDLE-a NEEDLE end"
    docker = b'{"log":"one NEEDLE "}\n{"log":"two\\n"}\n{"log":"other\\n"}\n'
    _, (hit,) = read(docker)
    assert hit.line.text == "one NEEDLE two"


def test_paths_that_are_no_logs(tmp_path: Path) -> None:
    for name, message in (
        (str(tmp_path), "a directory"),
        (str(tmp_path / "no"), "cannot be read"),
        ("/dev/null", "no regular file"),
    ):
        with pytest.raises(InputError, match=message):
            list(HitReader(NEEDLES).read(name))
    with pytest.raises(InputError):
        list(HitReader(NEEDLES).read("a\0b"))
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(InputError, match="cannot be read"):
        list(HitReader(NEEDLES).read(str(loop)))


def test_a_pipe_is_read(tmp_path: Path) -> None:
    """What `<(kubectl logs ...)` gives."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(b"x\nNEEDLE\n"))
    writer.start()
    found = [hit for _, hit in HitReader(NEEDLES).read(str(pipe)) if hit is not None]
    writer.join()
    assert len(found) == 1


def test_a_file_that_grows_is_read_to_where_it_ended_and_a_cut_one_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    line = b"NEEDLE" + b" text" * 40 + b"\n"
    path.write_bytes(line * 10_000)
    stream = HitReader(NEEDLES).read(str(path))
    next(stream)
    with path.open("ab") as file:
        file.write(line * 1000)
    hits = 1 + sum(hit is not None for _, hit in stream)
    assert hits == 10_000
    stream = HitReader(NEEDLES).read(str(path))
    source, _ = next(stream)
    os.truncate(path, 100)
    list(stream)
    assert source.problems == ["it became shorter while it was read"]
