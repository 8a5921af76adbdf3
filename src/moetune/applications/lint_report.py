"""What `moetune lint` is asked, and what it answers."""

from __future__ import annotations

from collections import Counter
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from moetune import __version__
from moetune.applications.path_arguments import AnyPaths, as_paths
from moetune.applications.request import DEFAULT_MAX_M, Request
from moetune.domain.codec import to_json
from moetune.domain.findings import Finding, Severity

SCHEMA = "moetune.lint/1"


@dataclass(frozen=True, slots=True)
class LintRequest:
    """What to look at, and as which server and GPU would see it.

    Attributes:
        paths: config files and directories.
        installed: the tree of the server that is installed here too.
        server: `sglang`, `vllm` or a plug-in; None: by the names and places of the files.
        server_version: its release; None: the installed one, else the newest known.
        triton_version: its Triton; None: the installed one, else what that release pins.
        gpu: what all files are judged for; None: each for the GPU of its own name.
        compute_capability: of GPUs that the registry does not know.
        max_m: the largest m that the server can meet.
        model: a checkpoint, whose K and topk let entries be compared with predictions.
        hidden: K by hand.
        topk: by hand.
        offline: never ask the network.
    """

    paths: AnyPaths = ()
    _: KW_ONLY
    installed: bool = False
    server: str | None = None
    server_version: str | None = None
    triton_version: str | None = None
    gpu: str | None = None
    compute_capability: str | None = None
    max_m: int = DEFAULT_MAX_M
    model: str | None = None
    hidden: int | None = None
    topk: int | None = None
    offline: bool = False

    @property
    def files(self) -> tuple[Path, ...]:
        """The paths that are named."""
        return as_paths(self.paths)

    def asked_server(self, name: str | None) -> Request:
        """The request that stands for the server of some files."""
        return Request(server=name, server_version=self.server_version, triton_version=self.triton_version)


@dataclass(frozen=True, slots=True)
class Tally:
    """How many files and entries of one kind there are, and what of them cannot be used.

    Attributes:
        server: whose files.
        vendor: of the GPU in the file's name.
        dtype: the tag of the name; `none`: it has none, as for bf16 and fp16.
        files: with this server, vendor and dtype.
        entries: that the server can read.
        files_cannot_run: with at least one entry that cannot run.
        entries_cannot_run: on the GPU that they were judged for.
        entries_wrong_numbers: that compute wrong numbers.
    """

    server: str
    vendor: str
    dtype: str
    files: int
    entries: int
    files_cannot_run: int
    entries_cannot_run: int
    entries_wrong_numbers: int


@dataclass(frozen=True, slots=True)
class Linted:
    """The answer to `moetune lint`.

    Attributes:
        findings: worst first, then by place.
        servers: releases that the files were judged by: name, version, Triton.
        gpu: the GPU that was named; empty: each file was judged for the GPU of its name.
        assumed: what nobody said and was taken, in words.
        files: that were looked at.
        entries: in them that could be read.
        tallies: by server, vendor and dtype.
    """

    findings: tuple[Finding, ...]
    servers: tuple[tuple[str, str, str], ...]
    gpu: str
    assumed: tuple[str, ...]
    files: int
    entries: int
    tallies: tuple[Tally, ...]

    def worst(self) -> Severity | None:
        """The worst severity found, None without findings."""
        return min((found.code.severity for found in self.findings), key=lambda one: one.rank, default=None)

    def fails(self, severity: Severity | None) -> bool:
        """Whether there is a finding at or above a severity; None never fails."""
        worst = self.worst()
        return severity is not None and worst is not None and worst.rank <= severity.rank

    def to_json(self) -> dict[str, Any]:
        """The document of `moetune lint --json`."""
        counts = Counter(found.code.severity.value for found in self.findings)
        return {
            "schema": SCHEMA,
            "moetune": __version__,
            "servers": [
                dict(zip(("name", "version", "triton_version"), one, strict=True)) for one in self.servers
            ],
            "gpu": self.gpu,
            "assumed": list(self.assumed),
            "files": self.files,
            "entries": self.entries,
            "counts": {severity.value: counts[severity.value] for severity in Severity},
            "tallies": to_json(self.tallies),
            "findings": [finding_to_json(found) for found in self.findings],
        }


def finding_to_json(found: Finding) -> dict[str, Any]:
    """A finding as it stands in documents."""
    return {
        "code": found.code.code,
        "title": found.code.title,
        "severity": found.code.severity.value,
        "message": found.message,
        "where": found.where,
        "facts": dict(found.facts),
        "cost": found.cost,
        "mend": found.mend,
    }
