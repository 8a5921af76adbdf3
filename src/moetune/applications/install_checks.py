"""What must hold of files before they are installed: lint's rules, and the server's own lookup."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.applications.config_files import read_config
from moetune.applications.file_meaning import why_never_read
from moetune.applications.install_target import is_nested
from moetune.applications.lint_file import FileJudge
from moetune.applications.lint_findings import Judged, finding
from moetune.applications.lint_tree import judge_tma, judge_tree, order_of
from moetune.applications.output import check_path
from moetune.applications.request import DEFAULT_MAX_M
from moetune.domain.errors import ConfigFileError, MoetuneError, OutputError
from moetune.domain.file_names import parse_file_name
from moetune.domain.findings import Severity
from moetune.domain.rules import find
from moetune.servers.protocol import ConfigTree, Outcome, ServerOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from moetune.applications.install_target import Target
    from moetune.domain.config import ConfigTable
    from moetune.domain.findings import Finding
    from moetune.domain.problem import Kernel
    from moetune.servers.protocol import Lookup, Server

FATAL = Severity.NEVER_READ
"""Files with a finding as bad as this, or worse, are not installed."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found about files that are to be installed.

    Attributes:
        fatal: why they must not be.
        remarks: what a person should know.
        lookups: path to what the server's lookup does for it once they are there.
        hidden: shipped files that the server then no longer reads, `directory/name`.
    """

    fatal: tuple[Finding, ...]
    remarks: tuple[Finding, ...]
    lookups: Mapping[str, Lookup]
    hidden: tuple[str, ...]


def check(target: Target, environ: Mapping[str, str], wanted: Mapping[str, bytes]) -> Checked:
    """Judge files at the places where they are to stand.

    Args:
        target: the directory and its server.
        environ: the variables of the server.
        wanted: paths of config files below the root, and their bytes.
    """
    return _Checking(target, environ, wanted).run()


class _Checking:
    def __init__(self, target: Target, environ: Mapping[str, str], wanted: Mapping[str, bytes]) -> None:
        self._target, self._server, self._wanted = target, target.server, wanted
        trees = target.trees(environ)
        self._trees = (with_files(trees[0], wanted), *trees[1:]) if trees else ()
        self._judge = FileJudge(target.server, max_m=DEFAULT_MAX_M)
        self._judged: dict[str, Judged] = {}
        self._findings: list[Finding] = []
        self._lookups: dict[str, Lookup] = {}

    def run(self) -> Checked:
        # The up file of a pair first: it overrides the down file's BLOCK_SIZE_M.
        for path in sorted(self._wanted, key=lambda path: (path.endswith("_down.json"), path)):
            self._look_at(path)
        for path in list(self._judged):
            self._look_at_partner(path)
        remarks: list[Finding] = []
        if is_nested(self._server):
            by_place = {
                (Path(path).parent.name, Path(path).name): judged for path, judged in self._judged.items()
            }
            # What is wrong with the rest of the tree was there before, and stays as it is.
            remarks = list(judge_tree(self._server, self._trees[0], by_place))
        fatal = [found for found in self._findings if found.code.severity.rank <= FATAL.rank]
        remarks += [found for found in self._findings if found.code.severity.rank > FATAL.rank]
        return Checked(
            tuple(dict.fromkeys(fatal)), tuple(dict.fromkeys(remarks)), self._lookups, self._hidden()
        )

    def _look_at(self, path: str) -> None:
        name = Path(path).name
        up = self._up_table(path) if self._server.separate_down_file else None
        judged = self._judge.judge(name, path, self._wanted[path], up)
        self._judged[path] = judged
        self._findings += judged.findings
        if judged.problem is None or any(f.code.severity is Severity.NEVER_READ for f in judged.findings):
            return
        kernel = self._kernel(judged)
        lookup = self._server.lookup(judged.problem, kernel, self._trees, ServerOptions())
        self._lookups[path] = lookup
        expected = f"{self._trees[0].root}/{path}"
        if lookup.outcome is not Outcome.EXACT or lookup.found != expected:
            how = f"it takes {lookup.found}" if lookup.found else f"it ends with: {lookup.outcome.value}"
            self._say("MOE132", f"the server's lookup does not find it: {how}", path)

    def _kernel(self, judged: Judged) -> Kernel:
        down = judged.name is not None and judged.name.down and self._server.separate_down_file
        return "down" if down else "up"

    def _up_table(self, path: str) -> ConfigTable | None:
        """The entries that the up kernel runs with where the file of a down kernel is in use."""
        name = parse_file_name(Path(path).name)
        if name is None or not name.down:
            return None
        folder = path.rpartition("/")[0]
        up = f"{folder}/{replace(name, down=False)}".lstrip("/")
        if up in self._judged:
            return self._judged[up].table if self._judged[up].table.entries else None
        return self._found_table(path, "up")

    def _found_table(self, path: str, kernel: Kernel) -> ConfigTable | None:
        """The entries of what the lookup finds for the other kernel of a file's shape."""
        judged = self._found(path, kernel)
        return judged.table if judged is not None and judged.table.entries else None

    def _found(self, path: str, kernel: Kernel, up: ConfigTable | None = None) -> Judged | None:
        name = parse_file_name(Path(path).name)
        meaning = None if name is None else self._judge.meaning(name, self._judge.target(name)[0])
        if name is None or meaning is None:
            return None
        try:
            lookup = self._server.lookup(meaning.problem, kernel, self._trees, ServerOptions())
        except MoetuneError:
            return None
        if lookup.found is None or lookup.outcome is Outcome.REUSED_UP:
            return None
        content = read_config(Path(lookup.found))
        if not isinstance(content, bytes):
            return None
        return self._judge.judge(Path(lookup.found).name, lookup.found, content, up)

    def _look_at_partner(self, path: str) -> None:
        """The other file of the shape, where only one is installed: both are read, wherever they lie."""
        judged, server = self._judged[path], self._server
        if not server.separate_down_file or judged.name is None:
            return
        if judged.name.down:
            self._look_at_default_up(path, judged)
            return
        folder = path.rpartition("/")[0]
        if f"{folder}/{replace(judged.name, down=True)}".lstrip("/") in self._wanted:
            return
        partner = self._found(path, "down", judged.table if judged.table.entries else None)
        if partner is None:
            self._findings += judge_tma(server, judged, path)
            return
        for found in partner.findings:
            if found.code.code in _OF_PAIRS:
                self._findings.append(replace(found, message=f"with the new up file: {found.message}"))

    def _look_at_default_up(self, path: str, judged: Judged) -> None:
        """A down file whose up kernel runs with the server's default."""
        if self._up_table(path) is not None or judged.problem is None:
            return
        deaths = {}
        for m, config in judged.table.entries:
            default = self._server.default_config(judged.problem, "up", m)
            try:
                self._server.launch(judged.problem, "down", config, default)
            except ConfigFileError as death:
                deaths[m] = death.message
        if deaths:
            m, why = next(iter(deaths.items()))
            self._say("MOE106", f"there is no up file, and the default is another at m = {m}: {why}", path)

    def _say(self, code: str, message: str, path: str) -> None:
        self._findings.append(finding(code, message, path))

    def _hidden(self) -> tuple[str, ...]:
        """Shipped files that would be read, of shapes without a file in a tree that replaces them."""
        if len(self._trees) < 2 or not self._replaces():
            return ()
        mine, shipped = self._trees[0], self._trees[-1]
        kept = {_shape(name) for names in (mine.directories or {}).values() for name in names}
        lost = {name for names in (shipped.directories or {}).values() for name in names}
        order = order_of(self._server, shipped).directories
        # Of a name that lies in several directories the server reads one: copies behind it hide nothing.
        first = {name: find(name, shipped.directories or {}, order).directory for name in lost}
        return tuple(
            sorted(
                f"{directory}/{name}"
                for name, directory in first.items()
                if directory is not None
                and _shape(name) not in kept
                and _has_grammar(name)
                and not why_never_read(self._server, name)
            )
        )

    def _replaces(self) -> bool:
        """Whether the lookup goes through the first tree only."""
        shipped = self._trees[-1].root
        return not any(
            candidate.startswith(f"{shipped}/")
            for lookup in self._lookups.values()
            for candidate in lookup.candidates
        )


_OF_PAIRS = frozenset({"MOE106", "MOE111", "MOE144"})


def with_files(tree: ConfigTree, paths: Sequence[str] | Mapping[str, bytes]) -> ConfigTree:
    """A tree as it is once some files lie in it."""
    directories = {name: set(names) for name, names in (tree.directories or {}).items()}
    for path in paths:
        folder, _, name = path.rpartition("/")
        directories.setdefault(folder.removeprefix("configs/"), set()).add(name)
    return ConfigTree(tree.root, {name: frozenset(names) for name, names in directories.items()})


def _shape(name: str) -> str:
    return name.removesuffix(".json").removesuffix("_down")


def _has_grammar(name: str) -> bool:
    try:
        check_path(name)
    except OutputError:
        return False
    return True


def lookups_of(
    server: Server, trees: Sequence[ConfigTree], names: Sequence[str]
) -> Iterator[tuple[str, Lookup | None]]:
    """What the server's lookup does for each of some file names; None for what it never looks for."""
    judge = FileJudge(server, max_m=DEFAULT_MAX_M)
    for name in names:
        parsed = parse_file_name(name)
        meaning = None if parsed is None else judge.meaning(parsed, judge.target(parsed)[0])
        if parsed is None or meaning is None:
            yield name, None
            continue
        kernel: Kernel = "down" if parsed.down and server.separate_down_file else "up"
        try:
            spelled = server.file_name(meaning.problem, kernel)
            yield (
                name,
                server.lookup(meaning.problem, kernel, trees, ServerOptions()) if spelled == name else None,
            )
        except MoetuneError:
            yield name, None
