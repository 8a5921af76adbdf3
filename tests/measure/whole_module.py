"""The cache keys of a server's kernels, once from the module as a whole and once as moetune takes them out.

Run as a program: a server, its version, an empty folder. What the module imports of the
server is stood for by classes that do nothing; Triton and torch are the real ones.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from moetune.measure.kernel_file import load_kernel
from moetune.servers.kernel_values import GROUPED, PLAIN
from tests.measure.server_files import kernel_file

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Anything(type):
    """The type of a class that has every attribute, can be called and decorates nothing."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)

    def __call__(cls, *values: Any, **names: Any) -> Any:
        del names
        return values[0] if values and callable(values[0]) else cls

    def __or__(cls, other: Any) -> Any:
        return cls

    def __bool__(cls) -> bool:
        return False


def stand_in(name: str) -> Any:
    return type.__new__(_Anything, name, (), {})


class _Module(ModuleType):
    """A module that has every name."""

    __path__: list[str] = []  # noqa: RUF012 - what the import machinery asks of a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # vLLM takes Triton from a module of its own.
        if name in ("triton", "tl"):
            return importlib.import_module("triton" if name == "triton" else "triton.language")
        return stand_in(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of the server."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if name.split(".")[0] not in ("vllm", "sglang", "sgl_kernel"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def main() -> None:
    """Print both keys of both kernels."""
    package, version, folder = sys.argv[1:]
    file = kernel_file(package, version, Path(folder))
    taken = {name: load_kernel(file, name).cache_key for name in (PLAIN, GROUPED)}
    sys.meta_path.insert(0, _Finder())
    spec = importlib.util.spec_from_file_location(file.module, file.path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    whole = {name: getattr(module, name).cache_key for name in (PLAIN, GROUPED)}
    json.dump({"taken": taken, "whole": whole}, sys.stdout)


if __name__ == "__main__":
    main()
