"""What is installed for this interpreter, what its variables say, and which config files lie there.

Nothing is imported to find out: versions come from the packages' metadata, folders from the import
system's finders.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from dataclasses import dataclass, field
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.domain.catalogue import Published, published
from moetune.domain.errors import InputError, ServerError
from moetune.domain.text import printable
from moetune.domain.version import parse_release
from moetune.servers.protocol import ConfigTree, Server

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moetune.domain.version import Release

SERVERS = ("sglang", "vllm")
PACKAGES = (*SERVERS, "triton", "torch")

_MAX_ENTRIES = 20_000
_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.I)
# A value that begins like a hub's or a service's token, or an address with a password in it.
SECRET_VALUE = re.compile(r"\b(?:hf_|sk-|ghp_|xox[bp]-)[A-Za-z0-9_-]{8,}|://[^/@\s]{1,256}@")
REDACTED = "(redacted)"
_VARIABLE_PREFIXES = ("SGLANG_", "VLLM_", "MOETUNE_", "TRITON_", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True)
class Installed:
    """A package of this interpreter.

    Attributes:
        version: as its metadata says.
        folder: of the package, None when only its metadata is there.
    """

    name: str
    version: str
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class Environment:
    """What moetune sees of the machine's software.

    Attributes:
        python: version of the interpreter.
        executable: path of the interpreter.
        packages: name to package, of the servers, triton and torch that are installed.
        variables: variables of the servers, of Triton and of moetune, secrets redacted.
    """

    python: str
    executable: str
    packages: Mapping[str, Installed] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def servers(self) -> tuple[Installed, ...]:
        """The servers that are installed."""
        return tuple(self.packages[name] for name in SERVERS if name in self.packages)

    def version(self, name: str) -> str | None:
        """Version of a package, None when it is not installed."""
        package = self.packages.get(name)
        return package.version if package is not None else None


def inspect_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Look at this interpreter and its variables, importing nothing.

    Args:
        environ: the variables; None takes those of this process.
    """
    found = {name: package for name in PACKAGES if (package := find_installed(name)) is not None}
    return Environment(
        python=".".join(map(str, sys.version_info[:3])),
        executable=sys.executable,
        packages=found,
        variables=listed_variables(os.environ if environ is None else environ),
    )


def find_installed(name: str) -> Installed | None:
    """An installed package by its name, without importing it."""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
    # Metadata that a broken uninstall left behind has no version.
    if not version:
        return None
    return Installed(name, printable(version, 64), _package_folder(name))


def _package_folder(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    # A folder without __init__.py that happens to have the name is no package.
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def listed_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter here, sorted, with the values of those that look like secrets redacted."""
    return {
        name: REDACTED if _is_secret(name, environ[name]) else printable(environ[name], 1024)
        for name in sorted(environ)
        if name.startswith(_VARIABLE_PREFIXES)
    }


def _is_secret(name: str, value: str) -> bool:
    return _SECRET_NAME.search(name) is not None or SECRET_VALUE.search(value) is not None


def config_trees(
    server: Server, environ: Mapping[str, str], installed: Installed | None
) -> tuple[ConfigTree, ...]:
    """The trees of tuned files that a server reads, first one first.

    The tree that the server's variable names comes first (SGLang then looks at no other), then the
    shipped one: the installed server's own, else what its published wheel holds.

    Args:
        server: the server and its release.
        environ: the variables it runs with.
        installed: the installed server, when it is the one that is meant.
    """
    trees = []
    variable = server.directory_variable
    if variable is not None and variable in environ:
        trees.append(read_tree(Path(environ[variable]), nested=_nested(server)))
    shipped = shipped_tree(server, installed)
    return (*trees, shipped) if shipped is not None else tuple(trees)


def shipped_tree(server: Server, installed: Installed | None) -> ConfigTree | None:
    """The tuned files that come with a server; None where nothing is known of them."""
    known = published(server.name, _release(server.version))
    if known is None:
        return None
    if installed is not None and installed.folder is not None:
        return read_tree(installed.folder.parent / known.home, nested=_nested(server))
    return published_tree(known)


def published_tree(known: Published) -> ConfigTree:
    """The tree inside a published wheel."""
    return ConfigTree(known.home, known.directories)


def _nested(server: Server) -> bool:
    """Whether the server keeps its files in directories of `configs/`."""
    known = published(server.name)
    return known is not None and "" not in known.directories


def _release(version: str) -> Release | None:
    try:
        return parse_release(version)
    except ServerError:
        return None


def read_tree(root: Path, *, nested: bool) -> ConfigTree:
    """Read the names of the files below a directory, two levels deep at most.

    Args:
        root: what the server's variable can point to.
        nested: files lie in directories of `{root}/configs` (SGLang), not in the root (vLLM).

    Raises:
        InputError: for what cannot be read as a directory, or holds too many entries for one.
    """
    if not nested:
        names = _names(root)
        return ConfigTree(str(root), None if names is None else {"": frozenset(names)})
    below = root / "configs"
    entries = _names(below)
    if entries is None:
        return ConfigTree(str(root), None)
    directories: dict[str, frozenset[str]] = {}
    left = _MAX_ENTRIES
    for entry in sorted(entries):
        # SGLang lists whatever lies here; what is no directory stands as an empty one.
        found = _names(below / entry, left) if os.path.isdir(below / entry) else None  # noqa: PTH112 - never raises
        directories[entry] = frozenset(found or ())
        left -= len(directories[entry])
    return ConfigTree(str(root), directories)


def _names(folder: Path, limit: int = _MAX_ENTRIES) -> list[str] | None:
    """Names in a folder; None when there is no such folder.

    Links are followed, as the servers follow them: files mounted into a container are links.
    """
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, limit + 1)]
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"{printable(str(folder))} cannot be read as a directory: {reason}",
            "name the directory of tuned files",
        ) from None
    if len(names) > limit:
        raise InputError(
            f"{printable(str(folder))} holds more than {limit} entries, too many for tuned files",
            "name the directory of tuned files itself",
        )
    return names
