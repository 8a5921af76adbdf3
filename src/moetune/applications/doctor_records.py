"""What doctor keeps of logs: starts, looked-up files and crashes, by server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moetune.applications.doctor_reader import LogSource
    from moetune.servers import log_events as say
    from moetune.servers.log_crashes import Fault


@dataclass(slots=True)
class Start:
    """One start of a server.

    Attributes:
        values: its resolved arguments.
        where: file and line.
    """

    values: dict[str, str]
    where: str

    def number(self, *names: str) -> int | None:
        """The first of these arguments that is a whole number."""
        for name in names:
            text = self.values.get(name, "")
            if text.isdigit() and len(text) < 10:
                return int(text)
        return None

    def text(self, *names: str) -> str:
        """The first of these arguments that is said."""
        return next((self.values[n] for n in names if self.values.get(n) not in (None, "", "None")), "")


@dataclass(slots=True)
class Shape:
    """One file that was looked for.

    Attributes:
        name: the file; of several places the last, which is the server's own.
        places: all of them.
        outcome: `found`, `stale`, `missing` or `reused up`.
        found: what was read instead, for `stale`.
        where: first line that says so.
        ranks: that said so.
        start: the start that it belongs to, None when the log does not show it.
    """

    name: say.ConfigName
    places: tuple[say.ConfigName, ...]
    outcome: str
    found: say.ConfigName | None
    where: str
    ranks: set[str]
    start: Start | None


@dataclass(slots=True)
class Crash:
    """A launch or a load that ended in an exception.

    Attributes:
        fault: what it means, None for a launch that does not fit.
        sentence: in words.
        resources: of a launch that does not fit.
        inside: the traceback passed the fused-MoE code.
        raised: type and message.
        where: first line.
        ranks: that died of it.
    """

    fault: Fault | None
    sentence: str
    resources: say.OutOfResources | None
    inside: bool
    raised: str
    where: str
    ranks: set[str]
    start: Start | None


@dataclass(slots=True)
class ServerFacts:
    """What the logs say about one server."""

    name: say.ServerName
    exact: str = ""
    since: tuple[int, ...] = ()
    until: tuple[int, ...] = ()
    starts: list[Start] = field(default_factory=list)
    architecture: str = ""
    limits: dict[str, int] = field(default_factory=dict)
    graphs: dict[str, say.GraphSizes] = field(default_factory=dict)
    graphs_off: dict[str, str] = field(default_factory=dict)
    fusion: dict[str, str] = field(default_factory=dict)
    runners: dict[tuple[str, tuple[str, ...]], say.RunnerChosen] = field(default_factory=dict)
    ignored: str = ""
    overrides: dict[tuple[int, int, int], str] = field(default_factory=dict)
    tma: dict[str, str] = field(default_factory=dict)
    shapes: dict[tuple[str, str], Shape] = field(default_factory=dict)
    crashes: dict[tuple[str, str], Crash] = field(default_factory=dict)
    ready: bool = False

    @property
    def start(self) -> Start | None:
        """The last start."""
        return self.starts[-1] if self.starts else None


@dataclass(slots=True)
class LogFacts:
    """What the logs say.

    Attributes:
        servers: by name, in the order in which they appear.
        dense: files of the dense GEMM that are missing, with the line.
        sources: the logs, as they were read.
    """

    servers: dict[str, ServerFacts] = field(default_factory=dict)
    dense: dict[str, str] = field(default_factory=dict)
    sources: list[LogSource] = field(default_factory=list)
    orphans: dict[tuple[str, str], Crash] = field(default_factory=dict)
