"""Published wheels of the servers: fetched once with pip, kept outside the tree, read as zips.

Nothing of them is installed or committed. A wheel that cannot be had is a failure, not a skip:
these tests are what proves that our rules are the servers' own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path


def wheel_cache() -> Path:
    """Where the wheels lie: MOETUNE_WHEELS, else the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moetune" / "wheels"
    return Path(os.environ.get("MOETUNE_WHEELS") or default)


@cache
def wheel(package: str, version: str) -> Path:
    """Path of a published wheel, downloaded when the cache lacks it."""
    cache = wheel_cache()
    cache.mkdir(parents=True, exist_ok=True)
    pattern = f"{package}-{version}-*.whl"
    found = sorted(cache.glob(pattern))
    if not found:
        # Into a folder of its own first: a download that is cut off must not look like a wheel.
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
            subprocess.run([*command, "-d", folder, f"{package}=={version}"], check=True, timeout=900)
            for path in Path(folder).glob("*.whl"):
                path.replace(cache / path.name)
        found = sorted(cache.glob(pattern))
    return found[0]


@cache
def _archive(package: str, version: str) -> zipfile.ZipFile:
    return zipfile.ZipFile(wheel(package, version))


@cache
def members(package: str, version: str) -> tuple[str, ...]:
    """Names of all files in a wheel."""
    return tuple(_archive(package, version).namelist())


def read_member(package: str, version: str, name: str) -> str:
    """Text of one file in a wheel."""
    return _archive(package, version).read(name).decode("utf-8")
