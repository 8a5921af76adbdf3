"""Whether a config arm read the very files that were put in place for it."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from moetune.domain.experiment import ConfigRead, Proof
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from moetune.domain.experiment import ServerFacts
    from moetune.domain.experiment_plan import Intervention

_READ = ("exact", "stale")
_MAX_FILES = 4096
_TAIL = 2
"""Parts of a path that are compared where the server sees another root, as in a container: the file, and
the directory that holds it (of a Triton version, for SGLang)."""

Outcome = tuple[Proof, list[str], list[str]]


def config_names(intervention: Intervention) -> frozenset[str]:
    """Bare names of the config files of an intervention; directories are looked through."""
    return frozenset(PurePosixPath(path).name for path in _files(intervention.configs))


def _files(paths: Sequence[str]) -> Iterator[str]:
    for path in paths:
        if path.endswith(".json"):
            yield path
            continue
        count = 0
        for folder, _, names in os.walk(path):
            for name in sorted(names):
                count += 1
                if count > _MAX_FILES:
                    return
                if name.endswith(".json") and not name.endswith(".provenance.json"):
                    yield str(Path(folder) / name)


def prove_configs(
    baseline: Sequence[ServerFacts],
    arm: Sequence[ServerFacts],
    intervention: Intervention,
    installed: Sequence[str],
) -> Outcome:
    """Whether the arm's lookups ended with the intervention's files, or without files at all.

    Args:
        baseline: facts of its starts.
        arm: facts of the arm's starts.
        intervention: with `configs` or `without_configs`.
        installed: paths at which the files were put; empty: only their names are known.
    """
    mode = next(
        (c.path for facts in (*arm, *baseline) for c in facts.configs if c.outcome == "ignored"), None
    )
    name = printable(intervention.name, 100)
    if mode is not None:
        problem = (
            f"{mode or 'a mode of the server'} is on, in which no config file is opened: {name!r} is void"
        )
        return Proof.NOT_SEEN, [], [problem]
    if intervention.without_configs:
        return _prove_absence(baseline, arm, name)
    names = config_names(intervention)
    placed = tuple(path for path in installed if PurePosixPath(path).name in names or not names)
    wanted = placed or tuple(sorted(names))
    known = {config.path for facts in baseline for config in facts.configs if config.outcome in _READ}
    evidence: list[str] = []
    for facts in arm:
        read, problems = _of_start(facts.configs, wanted, bool(placed), known)
        if problems or not read:
            return Proof.NOT_SEEN, [], problems or [_nothing_read(facts, wanted, name)]
        evidence += read
    return Proof.ACTIVE, list(dict.fromkeys(evidence)), []


def _of_start(
    configs: Sequence[ConfigRead], wanted: Sequence[str], placed: bool, known: set[str]
) -> tuple[list[str], list[str]]:
    """Evidence and problems of one start: each file that it looked for and we placed has to be read."""
    by_name = {PurePosixPath(path).name: path for path in wanted}
    read, problems = [], []
    for config in configs:
        path = by_name.get(PurePosixPath(config.path).name if config.outcome == "stale" else config.file)
        if path is None:
            continue
        if config.outcome not in _READ:
            problems.append(
                f"the lookup of {config.file} ended with {_words(config)}, not with the file of this arm"
            )
        elif placed and not _same(config.path, path, known):
            problems.append(f"the server read {config.path}, not {printable(path, 600)} of this arm")
        else:
            read.append(f"Using … config from {config.path} ({config.kernel})")
    return read, problems


def _same(seen: str, placed: str, known: set[str]) -> bool:
    """Whether the path of a log is that of the file which was put in place."""
    if PurePosixPath(seen) == PurePosixPath(placed):
        return True
    # The server may see it under another root. Then it is one that the baseline did not read.
    tail, ours = PurePosixPath(seen).parts[-_TAIL:], PurePosixPath(placed).parts[-_TAIL:]
    return tail == ours and seen not in known


def _prove_absence(baseline: Sequence[ServerFacts], arm: Sequence[ServerFacts], name: str) -> Outcome:
    before = {config.file for facts in baseline for config in facts.configs if config.outcome in _READ}
    if not before:
        return Proof.NOT_SEEN, [], [f"the baseline reads no config file, so {name!r} changes nothing"]
    still = {config.path for facts in arm for config in facts.configs if config.outcome in _READ}
    if still:
        return Proof.NOT_SEEN, [], [f"the server still reads {min(still)}, which {name!r} takes away"]
    silent = [facts for facts in arm if not facts.configs]
    if silent:
        return Proof.NOT_SEEN, [], [f"{len(silent)} of {len(arm)} logs show no lookup of a config file"]
    return Proof.ACTIVE, [f"no config file is read any more: {file}" for file in sorted(before)], []


def _nothing_read(facts: ServerFacts, wanted: Sequence[str], name: str) -> str:
    files = ", ".join(sorted({printable(PurePosixPath(path).name, 200) for path in wanted})) or "no file"
    looked = ", ".join(dict.fromkeys(f"{c.file}: {_words(c)}" for c in facts.configs))
    return f"the log has no line that a config file of {name!r} was read ({files}); " + (
        f"it looked for {looked}" if looked else "it shows no lookup at all"
    )


def _words(config: ConfigRead) -> str:
    return f"{config.outcome} ({config.path})" if config.path else config.outcome
