"""Machine code of the kernel under several releases of Triton: compiled with no GPU, kept in one archive.

Each release lies unpacked in a folder of its own and compiles in processes that find it first. What is
compiled is moetune's own kernel as this checkout has it. Nothing here imports Triton or torch.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import tarfile
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.h200.common import python_path
from moetune.applications.compiling import CompilePool
from moetune.domain.compilation import CompileResult, CompileStatus, CompileTask, Depth

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ARCHIVE = "cubins.tar.xz"
SIZES = {"i32": 4, "i64": 8}
"""Bytes of a parameter by its type; all others are pointers."""
_POINTER_BYTES = 8
SCRATCH = ("global scratch", "profile scratch")
"""What Triton 3.5 to 3.9 hands over behind the kernel's own parameters: pointers, null where not used
(backends/nvidia/driver.py:make_launcher, from 3.7 on driver.c)."""
_KPARAM_INFO = 0x17
_FORMAT_SIZED = 0x04


@dataclass(frozen=True, slots=True)
class Binary:
    """One binary and how it is launched.

    Attributes:
        name: of the kernel in the cubin.
        threads: of a block.
        shared_bytes: dynamic shared memory.
        parameters: names and types of the kernel's own parameters that are no constants, in order.
        scratch_bytes: of the two parameters behind them.
        code: hash of the machine instructions.
        triton: the release.
    """

    name: str
    threads: int
    shared_bytes: int
    parameters: tuple[tuple[str, str], ...]
    scratch_bytes: tuple[int, int]
    code: str
    triton: str

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Binary:
        """Read what `asdict` gave."""
        parameters = tuple((name, kind) for name, kind in value["parameters"])
        first, second = value["scratch_bytes"]
        return cls(**{**value, "parameters": parameters, "scratch_bytes": (first, second)})

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @property
    def sizes(self) -> list[int]:
        """Bytes of every parameter of the launch."""
        return [SIZES.get(kind, _POINTER_BYTES) for _, kind in self.parameters] + [_POINTER_BYTES] * 2


def key_of(task: CompileTask) -> str:
    """A name for the files of a task."""
    return hashlib.sha256(json.dumps(task.to_json(), sort_keys=True).encode()).hexdigest()[:20]


def section(cubin: bytes, name: str) -> bytes:
    """A section of an ELF file of 64 bits.

    Raises:
        ValueError: when there is none of that name.
    """
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names_index = struct.unpack_from("<3H", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + index * entry_size) for index in range(count)]
    names = headers[names_index][4]
    for header in headers:
        start = names + header[0]
        if cubin[start : cubin.index(b"\0", start)].decode() == name:
            return cubin[header[4] : header[4] + header[5]]
    raise ValueError(f"the cubin has no section {name}")


def parameter_sizes(cubin: bytes, kernel: str) -> list[int]:
    """Bytes of each parameter of a kernel, as the machine code says (EIATTR_KPARAM_INFO, cuobjdump -elf)."""
    info, offset, found = section(cubin, f".nv.info.{kernel}"), 0, {}
    while offset < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, offset)
        offset += 4
        if form == _FORMAT_SIZED:
            if attribute == _KPARAM_INFO:
                _, ordinal, _, flags = struct.unpack_from("<IHHI", info, offset)
                found[ordinal] = flags >> 18  # in bytes; the bits below say where it lies
            offset += size
    return [found[ordinal] for ordinal in sorted(found)]


def code_hash(cubin: bytes, kernel: str) -> str:
    """Hash of the machine instructions alone: the rest holds line numbers and names of files."""
    return hashlib.sha256(section(cubin, f".text.{kernel}")).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Compiled:
    """What came of one task under one release.

    Attributes:
        result: of the compiler.
        binary: how it is launched; None where it cannot.
        cubin: the machine code.
    """

    result: CompileResult
    binary: Binary | None = None
    cubin: bytes = b""


def compile_with(
    triton: Path | None, tasks: Iterable[CompileTask], workers: int | None = None
) -> dict[CompileTask, Compiled]:
    """Compile tasks with the Triton in a folder, or with that of this environment.

    Raises:
        ValueError: when a binary takes other parameters than it is launched with.
    """
    with tempfile.TemporaryDirectory(prefix="moetune-cubins-") as folder:
        pool = CompilePool(
            Depth.BINARY,
            seconds_each=60.0,
            workers=workers,
            worker=("-m", "benchmarks.h200.cubin_worker", folder),
            variables={
                "PYTHONPATH": ":".join([*([str(triton)] if triton else []), python_path()]),
                "TRITON_DISABLE_LINE_INFO": "1",
            },
        )
        found = {}
        for task, result in pool.compile(tasks).items():
            binary, cubin = None, b""
            if result.status is CompileStatus.OK:
                path = Path(folder) / key_of(task)
                binary = Binary.from_json(json.loads(path.with_suffix(".json").read_text()))
                cubin = path.with_suffix(".cubin").read_bytes()
                if parameter_sizes(cubin, binary.name) != binary.sizes:
                    raise ValueError(f"{binary.triton}: parameters {parameter_sizes(cubin, binary.name)}")
            found[task] = Compiled(result, binary, cubin)
        return found


def write_archive(path: Path, files: Mapping[str, bytes]) -> None:
    """Write files into one compressed archive, in the order given: alike ones side by side are small."""
    with tarfile.open(path, "w:xz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def read_archive(path: Path) -> dict[str, bytes]:
    """Read what `write_archive` wrote, into memory."""
    found = {}
    with tarfile.open(path, "r:xz") as archive:
        for member in archive:
            stream = archive.extractfile(member)
            if stream is not None:
                found[member.name] = stream.read()
    return found
