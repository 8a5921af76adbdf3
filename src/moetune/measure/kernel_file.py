"""Taking the kernels out of a server's file, without importing the server.

A server takes seconds and gigabytes to import, and asks for CUDA on the way; processes that only compile
have neither time nor a CUDA context for that. The kernels need nothing of it: they are functions of Triton's
language. So they are compiled from the file itself, each function at its own lines, which is all that Triton
looks at: its cache key, and so the binary, is that of the server.

Nothing else of the file runs. What is let in: functions that nothing but `triton.jit` decorates, with literal
defaults, and names that are bound to a literal.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import linecache
import stat
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from moetune.domain.text import printable
from moetune.measure.worker import SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moetune.domain.server_kernel import KernelFile

_MAX_BYTES = 4 << 20
_INSTEAD = "; --kernel own times moetune's kernel instead"
_GIVEN = {"triton": triton, "tl": tl}
_DECORATOR = "triton.jit"
_ANNOTATIONS = {"tl.constexpr"}


class KernelFileError(SetupError):
    """A file whose kernels cannot be used."""

    def __init__(self, file: KernelFile, why: str) -> None:
        super().__init__(f"{printable(file.path, 400)} {why}{_INSTEAD}")


@lru_cache(maxsize=32)
def load_kernel(file: KernelFile, name: str) -> Any:  # noqa: ANN401 - Triton's own type
    """A kernel of a server's file as Triton's function.

    Raises:
        KernelFileError: when the file is not the one that was meant, or lacks the kernel, or the kernel
            needs more than Triton.
    """
    module = _parse(file)
    wanted = _closure(file, module, name)
    namespace: dict[str, Any] = {**_GIVEN, "__name__": file.module, "__file__": file.path}
    futures = [
        node for node in module.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"
    ]
    taken = ast.Module([*futures, *wanted], type_ignores=[])
    exec(compile(taken, file.path, "exec", dont_inherit=True), namespace)
    return namespace[name]


def _parse(file: KernelFile) -> ast.Module:
    path = Path(file.path)
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_BYTES:
            raise KernelFileError(file, f"is no file of at most {_MAX_BYTES >> 20} MiB")
        data = path.read_bytes()
    except OSError as error:
        raise KernelFileError(file, f"cannot be read: {error.strerror}") from None
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise KernelFileError(file, "has changed since this run began")
    # Triton reads the text through this cache, which may hold a file that was here before.
    linecache.checkcache(file.path)
    try:
        return ast.parse(data, file.path)
    except (SyntaxError, ValueError, RecursionError):
        raise KernelFileError(file, "is no Python file") from None


def _closure(file: KernelFile, module: ast.Module, name: str) -> list[ast.stmt]:
    """The definitions that a kernel needs, in the order of the file."""
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    constants = dict(_constants(module))
    wanted: dict[str, ast.stmt] = {}
    waiting = [name]
    while waiting:
        one = waiting.pop()
        if one in wanted:
            continue
        if one in functions:
            _check_function(file, functions[one])
            wanted[one] = functions[one]
            waiting += _free_names(functions[one])
        elif one in constants:
            wanted[one] = constants[one]
        elif one not in _GIVEN and not hasattr(builtins, one):
            needs = "lacks" if one == name else f"has a kernel {name} that needs"
            raise KernelFileError(file, f"{needs} {printable(one, 80)}")
    return sorted(wanted.values(), key=lambda node: node.lineno)


def _check_function(file: KernelFile, node: ast.FunctionDef) -> None:
    """Let nothing be evaluated with a function but Triton's decorator and literals."""
    for decorator in node.decorator_list:
        if not _is_plain(decorator):
            shown = printable(ast.unparse(decorator), 80)
            raise KernelFileError(file, f"has a kernel {node.name} with the decorator {shown}")
    given = node.args
    defaults = [*given.defaults, *(item for item in given.kw_defaults if item is not None)]
    if not node.decorator_list or not all(map(_is_literal, defaults)):
        raise KernelFileError(file, f"has a {node.name} that is no plain kernel of Triton's")
    parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    annotations = {ast.unparse(item.annotation) for item in parameters if item.annotation is not None}
    if annotations - _ANNOTATIONS or node.returns is not None:
        raise KernelFileError(file, f"has a kernel {node.name} with annotations that are not tl.constexpr")


def _is_plain(decorator: ast.expr) -> bool:
    """Whether it is `triton.jit`, or that called with literals."""
    if not isinstance(decorator, ast.Call):
        return ast.unparse(decorator) == _DECORATOR
    literals = [*decorator.args, *(keyword.value for keyword in decorator.keywords)]
    return ast.unparse(decorator.func) == _DECORATOR and all(map(_is_literal, literals))


def _constants(module: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    for node in module.body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        targets: list[ast.expr] = node.targets if isinstance(node, ast.Assign) else [node.target]
        if len(targets) == 1 and isinstance(targets[0], ast.Name) and _is_literal(node.value):
            yield targets[0].id, ast.copy_location(ast.Assign(targets=targets, value=node.value), node)


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _free_names(node: ast.FunctionDef) -> list[str]:
    """Names that a function's body reads and does not bind."""
    loaded: dict[str, None] = {}
    bound = {item.arg for item in ast.walk(node) if isinstance(item, ast.arg)}
    for statement in node.body:
        for item in ast.walk(statement):
            if isinstance(item, ast.Name):
                if isinstance(item.ctx, ast.Load):
                    loaded[item.id] = None
                else:
                    bound.add(item.id)
    return [name for name in loaded if name not in bound]
