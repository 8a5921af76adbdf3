"""The flags of a published server, read from the source of its argument parser.

`python -m tests.servers.server_options sglang` prints what `servers/data/sglang_options.json` has to hold.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from functools import cache
from typing import TYPE_CHECKING

from tests.wheels import members, read_member

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Where a server's flags are declared.
_SOURCES: Mapping[str, re.Pattern[str]] = {
    "sglang": re.compile(r"sglang/srt/(server_args\.py|arg_groups/.*\.py)"),
    "vllm": re.compile(
        r"vllm/(engine/arg_utils\.py|entrypoints/(openai|common)/cli_args\.py|entrypoints/cli/serve\.py)"
    ),
}
_DATACLASSES = ("FrontendArgs", "BaseFrontendArgs")
_FLAG = re.compile(r"--?[A-Za-z][\w.-]*", re.A)


@cache
def flags_of(package: str, version: str) -> frozenset[str]:
    """All flags that a release declares, long and short."""
    found: set[str] = set()
    for name in members(package, version):
        if _SOURCES[package].fullmatch(name):
            found.update(_declared(read_member(package, version, name)))
    return frozenset(found)


def _declared(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            yield from _added(node)
        elif isinstance(node, ast.AnnAssign):
            yield from _annotated(node)
        elif isinstance(node, ast.ClassDef) and node.name in _DATACLASSES:
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    yield _flag(item.target.id)


def _added(call: ast.Call) -> Iterator[str]:
    """`parser.add_argument("--flag", ...)`."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
        for item in call.args:
            if isinstance(item, ast.Constant) and isinstance(item.value, str) and _FLAG.fullmatch(item.value):
                yield item.value


def _annotated(node: ast.AnnAssign) -> Iterator[str]:
    """`field: A[type, Arg(...)]`, from which SGLang 0.5.14 and later derives a flag."""
    if not isinstance(node.target, ast.Name) or not isinstance(node.annotation, ast.Subscript):
        return
    if ast.unparse(node.annotation.value) != "A" or not isinstance(node.annotation.slice, ast.Tuple):
        return
    names = [_flag(node.target.id)]
    for part in node.annotation.slice.elts[1:]:
        if isinstance(part, ast.Call) and ast.unparse(part.func) == "Arg":
            given = {keyword.arg: keyword.value for keyword in part.keywords}
            if "no_cli" in given:
                return
            if "cli_name" in given:
                names[0] = ast.literal_eval(given["cli_name"])
            if "aliases" in given:
                names += ast.literal_eval(given["aliases"])
        elif not isinstance(part, ast.Constant | ast.JoinedStr | ast.BinOp):
            continue
        yield from names
        return


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def ranges(package: str, inspected: list[str]) -> dict[str, list[list[str]]]:
    """Flag to the stretches of the inspected releases that have it."""
    found: dict[str, list[list[str]]] = {}
    for at, version in enumerate(inspected):
        for flag in flags_of(package, version):
            stretches = found.setdefault(flag, [])
            if stretches and at and stretches[-1][1] == inspected[at - 1]:
                stretches[-1][1] = version
            else:
                stretches.append([version, version])
    return dict(sorted(found.items()))


def document(package: str, inspected: list[str]) -> str:
    """The JSON text of the packaged list."""
    rows = [
        f"    {json.dumps(flag)}: {json.dumps(rows)}" for flag, rows in ranges(package, inspected).items()
    ]
    head = {"server": package, "inspected": inspected}
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    return "\n".join(["{", *lines, '  "options": {', ",\n".join(rows), "  }", "}"]) + "\n"


if __name__ == "__main__":
    from importlib import resources

    data = resources.files("moetune.servers") / "data" / f"{sys.argv[1]}_flags.json"
    sys.stdout.write(document(sys.argv[1], json.loads(data.read_text("utf-8"))["inspected"]))
