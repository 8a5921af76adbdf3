"""`moetune lint`: config files, directories and installed trees judged by the rules of their server."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.applications.config_files import Discovered, Unreadable, discover, read_config
from moetune.applications.environment import SERVERS, config_trees, find_installed, read_tree
from moetune.applications.file_meaning import Sizes, guess_server, root_of, why_never_read
from moetune.applications.lint_file import FileJudge
from moetune.applications.lint_findings import Judged, finding
from moetune.applications.lint_report import Linted, LintRequest, Tally
from moetune.applications.lint_tree import is_nested, judge_tma, judge_tree
from moetune.applications.request import DEFAULT_OUT
from moetune.domain.errors import InputError
from moetune.domain.file_names import parse_file_name
from moetune.domain.findings import Finding
from moetune.domain.gpu import Gpu, find_gpu
from moetune.domain.text import printable
from moetune.servers.protocol import ConfigTree

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from moetune.domain.config import ConfigTable
    from moetune.domain.predict import PerformanceModel
    from moetune.servers.protocol import Server

_NO_TAG = "none"
_CANNOT_RUN = frozenset({"MOE111", "MOE112", "MOE113"})
_WRONG = frozenset({"MOE121", "MOE122"})
_HIDDEN_LISTED = 200


def lint(
    request: LintRequest, environ: Mapping[str, str] | None = None, model: PerformanceModel | None = None
) -> Linted:
    """Judge config files.

    Args:
        request: what to look at.
        environ: the variables of the server; None takes those of this process.
        model: the performance model; None takes the packaged one where K and topk are known.

    Raises:
        MoetuneError: for what cannot be looked at at all.
    """
    environ = os.environ if environ is None else environ
    return _Linting(request, environ, model).run()


@dataclass(frozen=True, slots=True)
class _Looked:
    path: Path
    directory: str
    judged: Judged


class _Linting:
    def __init__(
        self, request: LintRequest, environ: Mapping[str, str], model: PerformanceModel | None
    ) -> None:
        self._request, self._environ = request, environ
        self._gpu = (
            find_gpu(request.gpu, compute_capability=request.compute_capability) if request.gpu else None
        )
        self._sizes = sizes_of(request)
        self._model = model
        if model is None and (self._sizes.layer or (self._sizes.hidden and self._sizes.topk)):
            from moetune.domain.predict import PerformanceModel

            self._model = PerformanceModel.load()
        self._judges: dict[str, FileJudge] = {}
        self._assumed: list[str] = []
        self._findings: list[Finding] = []
        self._looked: list[tuple[str, _Looked]] = []
        self._texts: dict[Path, bytes] = {}

    def run(self) -> Linted:
        request = self._request
        if not request.files and not request.installed:
            raise InputError(
                "nothing is named to look at", "name config files or directories, or add --installed"
            )
        found = discover(request.files) if request.files else Discovered((), (), ())
        for unreadable in found.unreadable:
            self._cannot_read(unreadable)
        installed = self._installed_roots() if request.installed else {}
        if not found.files and not installed and not found.unreadable:
            shown = ", ".join(printable(str(path), 200) for path in request.files[:3])
            raise InputError(
                f"no config file lies below {shown}", "config files are called E=..,N=..,device_name=...json"
            )
        self._judge_groups(found.files, {})
        for name, roots in installed.items():
            for root in roots:
                self._judge_groups(discover([root]).files if root.is_dir() else (), {root: name})
        return self._answer()

    # which files, by which server

    def _judge_groups(self, files: Iterable[Path], whose: Mapping[Path, str]) -> None:
        """Judge files together that one server reads from one root."""
        groups: dict[tuple[str, Path], list[Path]] = {}
        for path in files:
            root = root_of(path)
            groups.setdefault(("" if root is None else "tree", root or path.parent), []).append(path)
        for root in whose:
            groups.setdefault(("tree", root.absolute()), [])
        for (kind, place), members in groups.items():
            texts = {path: content for path in members if isinstance(content := self._read(path), bytes)}
            name = next(iter(whose.values()), None) or self._request.server or self._guess(members, texts)
            judge = self._judge_of(name)
            self._judge_files(judge, place if kind else None, texts)

    def _read(self, path: Path) -> bytes | None:
        content = read_config(path)
        if isinstance(content, Unreadable):
            self._cannot_read(content)
            return None
        return content

    def _cannot_read(self, unreadable: Unreadable) -> None:
        self._findings.append(finding(unreadable.code, unreadable.reason, str(unreadable.path)))

    def _guess(self, paths: list[Path], texts: dict[Path, bytes]) -> str:
        guess = guess_server(paths, texts)
        if guess is not None:
            name, why = guess
        else:
            here = [server for server in SERVERS if find_installed(server) is not None]
            name = here[0] if here else SERVERS[0]
            why = "installed here" if here else "nothing says which"
        self._assume(f"--server {name}: {why}")
        return name

    def _assume(self, text: str) -> None:
        if text not in self._assumed:
            self._assumed.append(text)

    def _judge_of(self, name: str) -> FileJudge:
        if name not in self._judges:
            from moetune.applications.planning import open_asked

            server, _, assumed = open_asked(self._request.asked_server(name))
            for text in assumed:
                self._assume(text)
            self._judges[name] = FileJudge(
                server,
                gpu=self._gpu,
                compute_capability=self._request.compute_capability,
                max_m=self._request.max_m,
                sizes=self._sizes,
                model=self._model,
            )
        return self._judges[name]

    # one group

    def _judge_files(self, judge: FileJudge, root: Path | None, texts: Mapping[Path, bytes]) -> None:
        nested = is_nested(judge.server)
        looked: dict[Path, Judged] = {}
        # The up file of a pair first: it overrides the down file's BLOCK_SIZE_M.
        for path in sorted(texts, key=lambda path: (path.name.endswith("_down.json"), path)):
            up = self._up_of(judge, path, looked) if judge.server.separate_down_file else None
            judged = judge.judge(path.name, str(path), texts[path], up)
            looked[path] = judged
            self._looked.append((judge.server.name, _Looked(path, path.parent.name, judged)))
        for path, judged in looked.items():
            self._findings += [self._with_mend(judge.server, path, found) for found in judged.findings]
            if judge.server.separate_down_file and not _counterpart(path).exists():
                self._findings += judge_tma(judge.server, judged, str(path))
        if nested and root is not None:
            by_place = {(path.parent.name, path.name): judged for path, judged in looked.items()}
            self._judge_tree(judge.server, root, by_place)
        elif nested:
            self._say_misplaced(judge.server, looked)

    def _up_of(self, judge: FileJudge, path: Path, looked: Mapping[Path, Judged]) -> ConfigTable | None:
        """The entries of the up file beside a `_down` file, whether it is asked about or not."""
        name = parse_file_name(path.name)
        if name is None or not name.down:
            return None
        up = path.with_name(str(replace(name, down=False)))
        if up in looked:
            return looked[up].table if looked[up].table.entries else None
        content = read_config(up)
        if not isinstance(content, bytes):
            return None
        table = judge.judge(up.name, str(up), content).table
        return table if table.entries else None

    def _judge_tree(self, server: Server, root: Path, judged: Mapping[tuple[str, str], Judged]) -> None:
        try:
            tree = read_tree(root, nested=True)
        except InputError as error:
            self._findings.append(finding("MOE136", error.message, str(root)))
            return
        shown = self._shown_root(root)
        self._findings += judge_tree(server, ConfigTree(shown, tree.directories), judged)

    def _shown_root(self, root: Path) -> str:
        """The root as the person wrote it, where it lies below what was named."""
        for path in self._request.files:
            if root.is_relative_to(path.absolute()):
                return str(path / root.relative_to(path.absolute()))
        return str(root)

    def _say_misplaced(self, server: Server, looked: Mapping[Path, Judged]) -> None:
        by_folder = Counter(path.parent for path in looked)
        for folder, count in sorted(by_folder.items()):
            place = f"configs/triton_{server.triton_version.replace('.', '_')}"
            self._findings.append(
                finding(
                    "MOE132",
                    f"{count} file(s) where {server.name} never looks: it reads them from {place}/ below "
                    f"{server.directory_variable or 'its own folder'}",
                    str(folder),
                    facts=[("files", str(count))],
                )
            )

    def _with_mend(self, server: Server, path: Path, found: Finding) -> Finding:
        if found.mend or found.code.code not in _MENDED_BY_BORROW:
            return found
        gpu = dict(found.facts).get("gpu") or (self._gpu.torch_name if self._gpu else "")
        words = ["moetune", "borrow", str(path), "--server", server.name, "--server-version", server.version]
        words += ["--gpu", gpu] if gpu else []
        return replace(found, mend=shlex.join([*words, "--out", DEFAULT_OUT]))

    # the installed server

    def _installed_roots(self) -> dict[str, tuple[Path, ...]]:
        names = [self._request.server] if self._request.server else list(SERVERS)
        roots = {}
        for name in names:
            package = find_installed(name)
            if package is None:
                continue
            server = self._judge_of(name).server
            trees = config_trees(server, self._environ, package)
            if is_nested(server) and len(trees) > 1:
                self._say_hidden(server, trees[0], trees[-1])
                for tree in trees[:1]:
                    if tree.directories is None:
                        self._findings.append(
                            finding(
                                "MOE105",
                                f"{server.directory_variable} names a directory without configs/",
                                tree.root,
                            )
                        )
            roots[name] = tuple(Path(tree.root) for tree in trees if tree.directories is not None)
        if not roots:
            raise InputError(
                f"not installed for this interpreter: {', '.join(names)}",
                "run moetune in the server's environment, or name its directory",
            )
        return roots

    def _say_hidden(self, server: Server, mine: ConfigTree, shipped: ConfigTree) -> None:
        kept = {name for names in (mine.directories or {}).values() for name in names}
        lost = sorted({name for names in (shipped.directories or {}).values() for name in names} - kept)
        if self._gpu is not None:
            spelled = server.device_name(self._gpu)
            lost = [name for name in lost if (parsed := parse_file_name(name)) and parsed.device == spelled]
        lost = [name for name in lost if parse_file_name(name) and not why_never_read(server, name)]
        if lost:
            self._findings.append(
                finding(
                    "MOE133",
                    f"{server.directory_variable} hides {len(lost)} shipped files that it does not hold",
                    mine.root,
                    facts=[("files", str(len(lost))), ("names", " | ".join(lost[:_HIDDEN_LISTED]))],
                )
            )

    # the answer

    def _answer(self) -> Linted:
        ordered = sorted(
            dict.fromkeys(self._findings),
            key=lambda f: (f.code.severity.rank, f.code.code, f.where, f.message),
        )
        judged = [looked.judged for _, looked in self._looked]
        return Linted(
            findings=tuple(ordered),
            servers=tuple(
                (judge.server.name, judge.server.version, judge.server.triton_version)
                for judge in self._judges.values()
            ),
            gpu=self._gpu.torch_name if self._gpu else "",
            assumed=tuple(self._assumed),
            files=len(judged),
            entries=sum(len(one.table) for one in judged),
            tallies=tuple(_tallies(self._looked)),
        )


_MENDED_BY_BORROW = frozenset(
    {"MOE102", "MOE103", "MOE106", "MOE111", "MOE112", "MOE121", "MOE141", "MOE144"}
)


def sizes_of(request: LintRequest) -> Sizes:
    """What a person says about the model."""
    if request.model is None:
        return Sizes(hidden=request.hidden, topk=request.topk)
    from moetune.applications.checkpoints import resolve

    return Sizes(resolve(request.model, offline=request.offline))


def _counterpart(path: Path) -> Path:
    """The other file of a pair."""
    name = parse_file_name(path.name)
    return path if name is None else path.with_name(str(replace(name, down=not name.down)))


def _vendor(device: str) -> str:
    from moetune.applications.file_meaning import gpu_of

    gpu: Gpu = gpu_of(device)[0]
    return gpu.vendor


def _tallies(looked: list[tuple[str, _Looked]]) -> Iterator[Tally]:
    groups: dict[tuple[str, str, str], list[Judged]] = {}
    for server, one in looked:
        name = one.judged.name
        if name is not None:
            groups.setdefault((server, _vendor(name.device), name.dtype or _NO_TAG), []).append(one.judged)
    for (server, vendor, dtype), members in sorted(groups.items()):
        bad = [_count(member, _CANNOT_RUN) for member in members]
        yield Tally(
            server=server,
            vendor=vendor,
            dtype=dtype,
            files=len(members),
            entries=sum(len(member.table) for member in members),
            files_cannot_run=sum(count > 0 for count in bad),
            entries_cannot_run=sum(bad),
            entries_wrong_numbers=sum(_count(member, _WRONG) for member in members),
        )


def _count(judged: Judged, codes: frozenset[str]) -> int:
    return sum(any(fault.code in codes for fault in faults) for faults in judged.faults.values())
