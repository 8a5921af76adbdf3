"""Files that are there whole or not at all, written below one directory and nowhere else.

Everything below the directory goes through directory descriptors and follows no symbolic link. A set
of files is written to temporary names first and then renamed, so that a full disk, an interrupt or a
crash leaves the old files or the new ones. A temporary name begins with a dot: the loader of SGLang
dies on unknown `triton_*` entries, and no server looks for names like that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from moetune.domain.errors import OutputError
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_PREFIX, _SUFFIX = ".moetune-", ".tmp"
_LOCK_SECONDS = 10.0
_LARGEST_BYTES = 64 << 20
_ANOTHER_PLACE = "give another place with --out DIR"
_REASONS = {
    errno.ENOSPC: ("the disk is full", f"free some space, or {_ANOTHER_PLACE}"),
    errno.EDQUOT: ("the quota is used up", f"free some space, or {_ANOTHER_PLACE}"),
    errno.EFBIG: ("a limit on the size of files is reached", f"raise it (ulimit -f), or {_ANOTHER_PLACE}"),
    errno.EACCES: ("permission denied", f"change its permissions, or {_ANOTHER_PLACE}"),
    errno.EPERM: ("the system does not permit it", _ANOTHER_PLACE),
    errno.EROFS: ("the file system is read-only", _ANOTHER_PLACE),
    errno.ENOTDIR: ("a part of it is a file or a symbolic link, not a directory", _ANOTHER_PLACE),
    errno.EEXIST: ("a part of it is a file, not a directory", _ANOTHER_PLACE),
    errno.EISDIR: ("it is a directory", f"move it away, or {_ANOTHER_PLACE}"),
    errno.ELOOP: ("it is a symbolic link", f"remove the link, or {_ANOTHER_PLACE}"),
    errno.ENAMETOOLONG: ("a name is too long for the file system", _ANOTHER_PLACE),
}


@dataclass(frozen=True, slots=True)
class Attributes:
    """What a file is besides its bytes.

    Attributes:
        mode: permission bits, without set-user-id and the like.
        uid: its owner.
        gid: its group.
        mtime_ns: when it was last written.
        atime_ns: when it was last read.
    """

    mode: int
    uid: int
    gid: int
    mtime_ns: int
    atime_ns: int


class Places:
    """Some paths below a directory, held open; locked against other writers where they are written."""

    def __init__(self, root: Path, *, writing: bool = True, directory_mode: int | None = None) -> None:
        self.root = root
        self._writing, self._directory_mode = writing, directory_mode
        self._folders: dict[str, int] = {}
        self._made: list[tuple[int | None, str]] = []
        self._locked = True

    def read(self, relative: str, limit_bytes: int) -> bytes | None:
        """The bytes of a file; None when it is not there.

        Raises:
            OutputError: for what is no plain file or is larger than the limit.
        """
        folder, name = self._split(relative)
        # O_NONBLOCK: opening a named pipe must not wait for its other end.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, dir_fd=folder)
        except FileNotFoundError:
            return None
        except OSError as failure:
            _fail(self.root / relative, failure)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OutputError(
                f"{_shown(self.root / relative)} exists and is no plain file",
                f"move it away, or {_ANOTHER_PLACE}",
            )
        with os.fdopen(descriptor, "rb") as file:
            content = file.read(limit_bytes + 1)
        if len(content) > limit_bytes:
            raise OutputError(
                f"{_shown(self.root / relative)} exists and is larger than any config file",
                f"move it away, or {_ANOTHER_PLACE}",
            )
        return content

    def attributes(self, relative: str) -> Attributes | None:
        """What a plain file is besides its bytes; None when it is not there."""
        folder, name = self._split(relative)
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as failure:
            _fail(self.root / relative, failure)
        mode = stat.S_IMODE(status.st_mode) & 0o777
        return Attributes(mode, status.st_uid, status.st_gid, status.st_mtime_ns, status.st_atime_ns)

    def put(self, relative: str, content: bytes, attributes: Attributes | None = None) -> None:
        """Write one file and make it last: it is there whole, or as it was before.

        Args:
            relative: the file.
            content: its bytes.
            attributes: what it is besides; the owner only where this process may say so.

        Raises:
            OutputError: when it cannot be written.
        """
        folder, name = self._split(relative)
        temporaries: dict[str, str] = {}
        try:
            self._write(relative, content, temporaries, attributes)
            os.replace(temporaries[relative], name, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)
        except BaseException as failure:
            for temporary in temporaries.values():
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
            if isinstance(failure, OSError):
                _fail(self.root / relative, failure)
            raise

    def mark(self, relative: str) -> None:
        """Make an empty file, in one step.

        Raises:
            OutputError: when it cannot be made, or is there.
        """
        folder, name = self._split(relative)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            os.close(os.open(name, flags, 0o644, dir_fd=folder))
            os.fsync(folder)
        except OSError as failure:
            _fail(self.root / relative, failure)

    def remove(self, relative: str) -> None:
        """Remove a file, if it is there, and make that last.

        Raises:
            OutputError: when it cannot be removed.
        """
        folder, name = self._split(relative)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            os.fsync(folder)
        except OSError as failure:
            _fail(self.root / relative, failure)

    def has(self, relative: str) -> bool:
        """Whether the directory of a path is one of those that are open."""
        return relative.rpartition("/")[0] in self._folders

    def remove_folder(self, folder: str) -> None:
        """Remove a directory below the root, or with the empty text the root itself, if it is empty."""
        with contextlib.suppress(OSError):
            if not folder:
                os.rmdir(self.root)  # noqa: PTH106 - as with every call here, by descriptor or by name
                return
            above, _, name = folder.rpartition("/")
            root = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                descriptor = self._open_below(root, above)
            finally:
                os.close(root)
            try:
                os.rmdir(name, dir_fd=descriptor)
            finally:
                os.close(descriptor)

    def names(self, folder: str) -> list[str]:
        """Names of what lies in one of the opened directories, sorted."""
        with os.scandir(self._folders[folder]) as entries:
            return sorted(entry.name for entry in entries)

    def replace(self, texts: Mapping[str, str]) -> None:
        """Write files, all or none; of those that are renamed one by one the order is the mapping's.

        Raises:
            OutputError: when one cannot be written; the others are then as they were.
        """
        temporaries: dict[str, str] = {}
        before: dict[str, bytes | None] = {}
        relative = next(iter(texts), "")
        try:
            for relative, text in texts.items():
                self._write(relative, text.encode(), temporaries)
            for relative, temporary in temporaries.items():
                folder, name = self._split(relative)
                before[relative] = self.read(relative, _LARGEST_BYTES)
                os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            for folder in self._folders.values():
                os.fsync(folder)
        except BaseException as failure:
            self._undo(temporaries, before)
            if isinstance(failure, OSError):
                _fail(self.root / relative, failure)
            raise

    def _undo(self, temporaries: Mapping[str, str], before: Mapping[str, bytes | None]) -> None:
        for relative, temporary in temporaries.items():
            folder, name = self._split(relative)
            with contextlib.suppress(OSError):
                try:
                    os.unlink(temporary, dir_fd=folder)
                except FileNotFoundError:
                    # It was renamed, unless an interrupt came before it was made.
                    if relative in before:
                        self._restore(relative, name, before[relative])

    def _restore(self, relative: str, name: str, content: bytes | None) -> None:
        folder, _ = self._split(relative)
        if content is None:
            os.unlink(name, dir_fd=folder)
        else:
            temporaries: dict[str, str] = {}
            self._write(relative, content, temporaries)
            os.replace(temporaries[relative], name, src_dir_fd=folder, dst_dir_fd=folder)

    def _write(
        self,
        relative: str,
        content: bytes,
        temporaries: dict[str, str],
        attributes: Attributes | None = None,
    ) -> None:
        folder, _ = self._split(relative)
        temporary = f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}"
        # Known before it exists, so that an interrupt right after the call still finds it.
        temporaries[relative] = temporary
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o666, dir_fd=folder)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if attributes is not None:
                with contextlib.suppress(PermissionError):
                    os.fchown(descriptor, attributes.uid, attributes.gid)
                os.fchmod(descriptor, attributes.mode)
                os.utime(descriptor, ns=(attributes.atime_ns, attributes.mtime_ns))
            os.fsync(descriptor)

    def _split(self, relative: str) -> tuple[int, str]:
        folder, _, name = relative.rpartition("/")
        return self._folders[folder], name

    def _open(self, folders: Iterable[str]) -> None:
        if self._writing:
            self._make_root()
        root = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for folder in sorted(set(folders)):
                self._folders[folder] = self._open_below(root, folder)
        finally:
            os.close(root)
        if not self._writing:
            return
        for descriptor in self._folders.values():
            self._lock(descriptor)
        if self._locked:
            self._remove_leftovers()

    def _make_root(self) -> None:
        missing = []
        path = self.root
        while not os.path.lexists(path) and path != path.parent:
            missing.append(path)
            path = path.parent
        for path in reversed(missing):
            self._make(None, str(path))

    def _open_below(self, root: int, folder: str) -> int:
        descriptor = os.dup(root)
        for part in filter(None, folder.split("/")):
            try:
                if self._writing:
                    self._make(descriptor, part)
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                below = os.open(part, flags, dir_fd=descriptor)
            finally:
                # What was made in it is removed through a descriptor of its own.
                os.close(descriptor)
            descriptor = below
        return descriptor

    def _make(self, parent: int | None, name: str) -> None:
        try:
            os.mkdir(name, 0o777, dir_fd=parent)
            if self._directory_mode is not None:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                descriptor = os.open(name, flags, dir_fd=parent)
                try:
                    os.fchmod(descriptor, self._directory_mode)
                finally:
                    os.close(descriptor)
        except FileExistsError:
            return
        self._made.append((None if parent is None else os.dup(parent), name))

    def _lock(self, descriptor: int) -> None:
        deadline = time.monotonic() + _LOCK_SECONDS
        while not self._try_lock(descriptor):
            if time.monotonic() > deadline:
                raise OutputError(
                    f"another process is writing into {_shown(self.root)}", "wait for it, then try again"
                )
            time.sleep(0.02)

    def _try_lock(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            self._locked = False  # some network file systems have no locks
        return True

    def _remove_leftovers(self) -> None:
        """Remove temporary files of a process that was killed: whoever still writes holds the lock."""
        for descriptor in self._folders.values():
            with os.scandir(descriptor) as entries:
                names = [entry.name for entry in entries]
            for name in names:
                if name.startswith(_PREFIX) and name.endswith(_SUFFIX):
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=descriptor)

    def _remove_made(self) -> None:
        for parent, name in reversed(self._made):
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=parent)

    def _close(self) -> None:
        for parent, _ in self._made:
            if parent is not None:
                os.close(parent)
        for descriptor in self._folders.values():
            os.close(descriptor)


@contextmanager
def open_places(
    root: Path, relatives: Iterable[str], *, writing: bool = True, directory_mode: int | None = None
) -> Iterator[Places]:
    """Open the directories of some paths below a root, making those that are missing.

    Directories that were made are removed again when nothing was written into them.

    Args:
        root: the directory; its own path may lead through symbolic links.
        relatives: paths below it, `/` between their parts, checked by the caller.
        writing: False only looks: nothing is made, locked or cleared away, and a directory that is
            missing is an error.
        directory_mode: of directories that are made; None leaves it to the umask.

    Raises:
        OutputError: where a directory cannot be made, opened or locked.
    """
    if "\0" in str(root):
        raise OutputError(f"{_shown(root)} is no path", _ANOTHER_PLACE)
    places = Places(Path(root), writing=writing, directory_mode=directory_mode)
    try:
        try:
            places._open(relative.rpartition("/")[0] for relative in relatives)
        except OSError as failure:
            _fail(places.root, failure)
        yield places
    finally:
        places._remove_made()
        places._close()


def _fail(path: Path, failure: OSError) -> NoReturn:
    why, hint = _REASONS.get(failure.errno or 0, (failure.strerror or "unknown error", _ANOTHER_PLACE))
    raise OutputError(f"cannot write {_shown(path)}: {why}", hint) from failure


def _shown(path: Path) -> str:
    return printable(str(path), 400)
