"""Which kernel is timed: that of the server in the environment that measures, or moetune's own.

Nothing of a server is imported or run to find out. What is looked at are the version in the package's
metadata and the text of the file that holds its kernels.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.applications.environment import SERVERS, find_installed
from moetune.domain.compilation import CompileTask
from moetune.domain.config import KernelConfig
from moetune.domain.errors import InputError, ServerError
from moetune.domain.launch import Launch
from moetune.domain.server_kernel import OWN, KernelFile
from moetune.domain.text import printable
from moetune.servers.kernel_values import GROUPED, PLAIN, Lengths
from moetune.servers.protocol import KernelServer

if TYPE_CHECKING:
    from moetune.servers.protocol import Server

AUTO, OF_SERVER = "auto", "server"
CHOICES = (AUTO, "own", OF_SERVER)
"""What `--kernel` takes."""

_MAX_BYTES = 4 << 20
_MAX_VERSION = 64
_SECONDS = 60.0
_OWN_HINT = "add --kernel own to time moetune's own kernel instead"
_LOOK = """
import importlib.metadata, importlib.util, json, os, sys
name, found = sys.argv[1], [None, None]
try:
    found[0] = importlib.metadata.version(name)
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin:
        found[1] = os.path.dirname(spec.origin)
except Exception:
    pass
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """Which kernel is timed.

    Attributes:
        asked: `auto`, `own` or `server`.
        file: the server's file; None: moetune's own kernel.
        why: the reason, in words.
    """

    asked: str
    file: KernelFile | None
    why: str

    @property
    def source(self) -> str:
        """What the problem names as its kernel source."""
        return OWN if self.file is None else self.file.source

    @property
    def text(self) -> str:
        """For a person."""
        return f"moetune's own: {self.why}" if self.file is None else f"{self.file.text}: {self.why}"


class NoKernelError(InputError):
    """A server's kernel that was asked for and cannot be timed."""


def choose_kernel(
    asked: str, server: Server, python: str = sys.executable, files: str | Path | None = None
) -> KernelChoice:
    """Decide which kernel is timed.

    Args:
        asked: `auto`: the server's where it is there and of the version that is tuned for; `server`: that
            or an error; `own`.
        server: the release that is tuned for.
        python: the interpreter that measures.
        files: a folder with the Python files of a server, as a wheel holds them, instead of what is
            installed.

    Raises:
        NoKernelError: when the server's kernel was asked for and is not there.
        InputError: when the choice contradicts itself.
    """
    if asked not in CHOICES:
        raise InputError(f"no kernel is called {printable(asked, 40)!r}", f"known are {', '.join(CHOICES)}")
    if asked == "own":
        if files is not None:
            raise InputError("--server-files names the server's kernel, and --kernel own another", _OWN_HINT)
        return KernelChoice(asked, None, "asked for")
    if files is not None:
        return KernelChoice(asked, kernel_in(server, Path(files)), "in the folder that was named")
    try:
        return KernelChoice(asked, _installed_kernel(server, python), "installed where is measured")
    except NoKernelError as error:
        if asked == OF_SERVER:
            raise
        return KernelChoice(asked, None, error.message)


def measured_server(
    name: str | None, version: str | None, python: str, files: str | Path | None
) -> tuple[str | None, str | None]:
    """Server and version that are meant where they are not said: those that are there where is measured.

    Args:
        name: of the server, if it was said.
        version: likewise.
        python: the interpreter that measures.
        files: the folder of a server's files, if one was named.

    Returns:
        Both, None for what is not there either.
    """
    names = SERVERS if name is None else (name.strip().lower(),)
    if version is not None or (files is None and python == sys.executable):
        return name, version
    for one in names:
        found = version_in(one, Path(files)) if files is not None else _installed(one, python)[0]
        if found is not None:
            return one, found
    return name, version


def kernel_in(server: Server, folder: Path) -> KernelFile:
    """The kernel in a folder that holds the files of a server's wheel.

    Raises:
        NoKernelError: when there is none, or one of another version than the server's.
    """
    version = version_in(server.name, folder)
    if version is not None and version != server.version:
        raise NoKernelError(
            f"{_shown(folder)} holds {server.name} {version}, and {server.version} is tuned for",
            f"add --server-version {version}",
        )
    return _kernel_below(server, folder)


def version_in(name: str, folder: Path) -> str | None:
    """The version of a server whose wheel was unpacked into a folder; None where its metadata is not there.

    Raises:
        NoKernelError: for what cannot be read, and for several versions.
    """
    pattern = re.compile(rf"{re.escape(name)}-([0-9A-Za-z.+!]{{1,{_MAX_VERSION}}})\.dist-info")
    try:
        found = sorted(match[1] for entry in os.scandir(folder) if (match := pattern.fullmatch(entry.name)))
    except OSError as error:
        raise NoKernelError(
            f"{_shown(folder)} cannot be read as a directory: {error.strerror}",
            "name the folder that a wheel was unpacked into",
        ) from None
    if len(found) > 1:
        raise NoKernelError(f"{_shown(folder)} holds {name} {' and '.join(found[:4])}", "keep one of them")
    return found[0] if found else None


def _installed_kernel(server: Server, python: str) -> KernelFile:
    version, folder = _installed(server.name, python)
    if version is None or folder is None:
        raise NoKernelError(f"{server.name} is not installed in {printable(python, 200)}", _OWN_HINT)
    if version != server.version:
        raise NoKernelError(
            f"{server.name} {version} is installed where is measured, and {server.version} is tuned for",
            f"add --server-version {version}, or {_OWN_HINT.removeprefix('add ')}",
        )
    return _kernel_below(server, folder.parent)


def _installed(name: str, python: str) -> tuple[str | None, Path | None]:
    """Version and folder of a package of an interpreter."""
    if python == sys.executable:
        package = find_installed(name)
        return (None, None) if package is None else (package.version, package.folder)
    try:
        done = subprocess.run(
            [python, "-c", _LOOK, name],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
        answer = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None, None  # what measures will say what is wrong with it
    if not (isinstance(answer, list) and len(answer) == 2 and all(isinstance(item, str) for item in answer)):
        return None, None
    version, folder = answer
    return printable(version, _MAX_VERSION), Path(folder)


def _kernel_below(server: Server, root: Path) -> KernelFile:
    """The first of the files that may hold the kernels and does."""
    if not isinstance(server, KernelServer):
        raise NoKernelError(f"it is not known how the kernels of {server.name} are launched", _OWN_HINT)
    names = server.kernel_files()
    for name in names:
        path = (root / name).absolute()
        text = _read(path)
        if text is None or f"def {PLAIN}(" not in text:
            continue
        data = text.encode()
        file = KernelFile(
            server.name,
            server.version,
            str(path),
            name.removesuffix(".py").replace("/", "."),
            hashlib.sha256(data).hexdigest(),
        )
        _check_parameters(server, file, text)
        return file
    raise NoKernelError(f"{_shown(root)} holds no {names[0]} with a kernel {PLAIN}", _OWN_HINT)


def _read(path: Path) -> str | None:
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return None
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None


_ANY_TASK = CompileTask(Launch("up", KernelConfig(16, 16, 16, 1, 4, 2)), 90, "bf16", "bf16", 16, 16, 1)


def _check_parameters(server: KernelServer, file: KernelFile, text: str) -> None:
    """Refuse kernels with parameters whose meaning is not known here."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        raise NoKernelError(f"{_shown(Path(file.path))} is no Python file", _OWN_HINT) from None
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name in (PLAIN, GROUPED):
            names = [item.arg for item in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            try:
                server.kernel_values(names, _ANY_TASK, Lengths(16, 16))
            except ServerError as error:
                raise NoKernelError(f"{_shown(Path(file.path))}: {error.message}", _OWN_HINT) from None


def _shown(path: Path) -> str:
    return printable(str(path), 400)
