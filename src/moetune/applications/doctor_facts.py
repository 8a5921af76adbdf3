"""What the lines of logs add up to: starts, limits, graphs, runners, looked-up files and crashes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moetune.applications.doctor_records import Crash, LogFacts, ServerFacts, Shape, Start
from moetune.domain.log_lines import body, joinings, read_line, records
from moetune.servers import log_events as say
from moetune.servers.log_crashes import NEEDLES, Fault, fault_of
from moetune.servers.log_crashes import RULES as CRASHES
from moetune.servers.sglang.log_grammar import SGLangLogGrammar
from moetune.servers.vllm.log_grammar import VllmLogGrammar

if TYPE_CHECKING:
    from collections.abc import Callable

    from moetune.applications.doctor_reader import Hit, LogSource

GRAMMARS: tuple[say.LogGrammar, ...] = (SGLangLogGrammar(), VllmLogGrammar())
ALL_NEEDLES = frozenset({needle for grammar in GRAMMARS for needle in grammar.needles} | set(NEEDLES))

_LINE_ENDS = re.compile(r"[\r\n]+")
_REACH = 200  # lines between a frame of a traceback and its last line
_MAX_SHAPES = 512
_MAX_CRASHES = 64
_MAX_STARTS = 64
_CACHED = 4096


class LogReader:
    """Takes hits one after the other; `facts` is what they add up to."""

    def __init__(self) -> None:
        self.facts = LogFacts()
        self._frames: dict[str, tuple[int, say.Frame]] = {}
        self._cache: dict[str, tuple[say.Event, ...]] = {}
        self._used: tuple[str, int] = ("", 0)
        self._server: say.ServerName | None = None
        self._waiting: list[tuple[say.Event, Hit]] = []

    def next_log(self, source: LogSource) -> None:
        """A log has ended: its last traceback has nothing to do with the next one's lines."""
        self.facts.sources.append(source)
        self._frames.clear()
        self._used = ("", 0)

    def finish(self) -> LogFacts:
        """What all the lines add up to: a crash before any line of a server belongs to the only one."""
        if len(self.facts.servers) == 1:
            (server,) = self.facts.servers.values()
            for key, crash in self.facts.orphans.items():
                server.crashes.setdefault(key, crash)
            self.facts.orphans.clear()
        return self.facts

    def take(self, hit: Hit) -> None:
        """Read a line, joined with what continues it where it says nothing by itself."""
        if self._used[0] == hit.source.name and hit.number <= self._used[1]:
            return
        pieces = [part for text in _LINE_ENDS.split(hit.line.text)[:1024] for part in records(text)]
        for number, text in enumerate(pieces):
            record = hit
            if number:
                line = read_line(text.encode("utf-8", "replace"))
                record = replace(hit, line=line)
                text = line.text
            for event in self._read(text) or self._joined(record, text):
                self._note(event, record)

    def _read(self, text: str) -> tuple[say.Event, ...]:
        message = body(text)
        known = self._cache.get(message)
        if known is None:
            found = [event for grammar in GRAMMARS for event in grammar.read(message)]
            found += say.apply_rules(CRASHES, message)
            known = tuple(dict.fromkeys(found))
            if len(message) < 1024:
                if len(self._cache) >= _CACHED:
                    self._cache.clear()
                self._cache[message] = known
        return known

    def _joined(self, hit: Hit, text: str) -> tuple[say.Event, ...]:
        """A line that was wrapped: a terminal, a pager or a mail put it into several."""
        if hit.line.starts_record and not self._opens(text):
            return ()
        after: list[str] = []
        for line in hit.after:
            if line.starts_record:
                break
            after.append(line.text)
        before: list[str] = []
        if not hit.line.starts_record:
            for line in reversed(hit.before):
                before.insert(0, line.text)
                if line.starts_record:
                    break
        if not (before or after) or not self._opens(" ".join([*before[-1:], text, *after[:1]])):
            return ()
        for first in range(len(before), -1, -1):
            for last in range(0 if first < len(before) else 1, len(after) + 1):
                for candidate in joinings([*before[first:], text, *after[:last]]):
                    events = self._read(candidate)
                    if any(not isinstance(event, say.Raised) for event in events):
                        self._used = (hit.source.name, hit.number + last)
                        return events
        return ()

    @staticmethod
    def _opens(text: str) -> bool:
        return any(opener in text for grammar in GRAMMARS for opener in grammar.openers)

    # --- events -------------------------------------------------------------------------------------

    def _note(self, event: say.Event, hit: Hit) -> None:
        # uvicorn's last line is that of any web server.
        if event.server is not None and not isinstance(event, say.Ready):
            self._server = event.server
            # What both servers print, before anything told which one this is.
            waiting, self._waiting = self._waiting, []
            for earlier, where in waiting:
                self._note(earlier, where)
        elif self._server is None and isinstance(event, say.RunnerChosen):
            if len(self._waiting) < _MAX_CRASHES:
                self._waiting.append((event, hit))
            return
        note = _NOTES.get(type(event))
        if note is not None:
            note(self, event, hit)

    def _of(self, event: say.Event) -> ServerFacts | None:
        name = event.server or self._server
        if name is None:
            return None
        return self.facts.servers.setdefault(name, ServerFacts(name))

    def _arguments(self, event: say.Arguments, hit: Hit) -> None:
        server = self._of(event)
        if server is None:
            return
        values = dict(event.values)
        last = server.start
        # vLLM says its arguments twice, and each rank and each part of a server may repeat them.
        same = last is not None and all(last.values.get(k, v) == v for k, v in values.items())
        if not event.starts or (same and last is not None):
            if last is None:
                server.starts.append(Start(values, hit.where))
            else:
                last.values.update(values)
            return
        if len(server.starts) < _MAX_STARTS:
            server.starts.append(Start(values, hit.where))
        # Facts of an earlier start are not this one's.
        if server.limits or server.graphs or server.ready:
            server.limits, server.graphs, server.graphs_off, server.fusion = {}, {}, {}, {}
            server.runners, server.ignored, server.ready = {}, "", False

    def _release(self, event: say.Release, hit: Hit) -> None:
        del hit
        server = self._of(event)
        if server is None:
            return
        server.exact = event.exact or server.exact
        server.since = max(server.since, event.since)
        if event.until:
            server.until = min(server.until or event.until, event.until)

    def _architecture(self, event: say.Architecture, hit: Hit) -> None:
        del hit
        server = self._of(event)
        if server is not None:
            server.architecture = server.architecture or event.name

    def _limit(self, event: say.Limit, hit: Hit) -> None:
        del hit
        server = self._of(event)
        if server is not None:
            server.limits[event.name] = event.value

    def _graphs(self, event: say.GraphSizes, hit: Hit) -> None:
        del hit
        server = self._of(event)
        if server is None:
            return
        known = server.graphs.get(event.phase)
        if known is not None:
            event = say.GraphSizes(
                event.server,
                event.phase,
                event.sizes or known.sizes,
                max(event.tokens_per_request, known.tokens_per_request),
                event.backend or known.backend,
            )
        server.graphs[event.phase] = event

    def _graphs_off(self, event: say.GraphsOff, hit: Hit) -> None:
        del hit
        server = self._of(event)
        if server is not None:
            # The line that gives a reason comes before the one that only tells the outcome.
            server.graphs_off.setdefault(event.phase, event.reason)

    def _fusion(self, event: say.AllReduceFusion, hit: Hit) -> None:
        del hit
        server = self._of(event)
        if server is not None:
            server.fusion.setdefault(event.state, event.reason)

    def _runner(self, event: say.RunnerChosen, hit: Hit) -> None:
        del hit
        server = self._of(event)
        if server is not None:
            server.runners.setdefault((event.runner.lower(), event.dtypes), event)

    def _ignored(self, event: say.FilesIgnored, hit: Hit) -> None:
        del hit
        server = self._of(event)
        if server is not None:
            server.ignored = event.mode

    def _override(self, event: say.PairOverridden, hit: Hit) -> None:
        server = self._of(event)
        if server is not None and len(server.overrides) < _MAX_SHAPES:
            server.overrides.setdefault((event.down, event.up, event.m), hit.where)

    def _tma(self, event: say.TmaEnabled, hit: Hit) -> None:
        server = self._of(event)
        if server is not None:
            server.tma.setdefault(event.kernel, hit.where)

    def _found(self, event: say.ConfigFound, hit: Hit) -> None:
        self._shape(event, hit, (event.name,), "found", None)

    def _stale(self, event: say.ConfigStale, hit: Hit) -> None:
        self._shape(event, hit, (event.wanted,), "stale", event.found)

    def _missing(self, event: say.ConfigMissing, hit: Hit) -> None:
        self._shape(event, hit, event.names, "reused up" if event.reused_up else "missing", None)

    def _shape(
        self,
        event: say.Event,
        hit: Hit,
        places: tuple[say.ConfigName, ...],
        outcome: str,
        found: say.ConfigName | None,
    ) -> None:
        server = self._of(event)
        if server is None:
            return
        name = places[-1]
        key = (name.file, outcome)
        if key in server.shapes:
            server.shapes[key].ranks.add(hit.line.rank)
        elif len(server.shapes) < _MAX_SHAPES:
            shape = Shape(name, places, outcome, found, hit.where, {hit.line.rank}, server.start)
            server.shapes[key] = shape

    def _frame(self, event: say.Frame, hit: Hit) -> None:
        if len(self._frames) > _CACHED:
            self._frames.clear()
        rank = hit.line.rank
        known = self._frames.get(rank)
        near = known is not None and hit.number - known[0] <= _REACH
        # A load happens inside a launch: the loader's frame is the one that matters.
        if near and known is not None and known[1].part == "loader" and event.part == "kernel":
            event = known[1]
        self._frames[rank] = (hit.number, event)
        self._of(event)

    def _near_frame(self, hit: Hit) -> say.Frame | None:
        for rank in dict.fromkeys((hit.line.rank, "")):
            known = self._frames.get(rank)
            if known is not None and 0 <= hit.number - known[0] <= _REACH:
                return known[1]
        return None

    def _resources(self, event: say.OutOfResources, hit: Hit) -> None:
        frame = self._near_frame(hit)
        text = f"OutOfResources: {event.resource}, required {event.required}, limit {event.limit}"
        self._crash(hit, frame, None, text, event, text)

    def _raised(self, event: say.Raised, hit: Hit) -> None:
        frame = self._near_frame(hit)
        if frame is None:
            return
        found = fault_of(event, frame.part)
        if found is not None:
            fault, sentence = found
            self._crash(hit, frame, fault, sentence, None, f"{event.kind}: {event.message}")
            self._frames.pop(hit.line.rank, None)

    def _crash(
        self,
        hit: Hit,
        frame: say.Frame | None,
        fault: Fault | None,
        sentence: str,
        resources: say.OutOfResources | None,
        raised: str,
    ) -> None:
        name = (frame.server if frame is not None else None) or self._server
        server = None if name is None else self.facts.servers.setdefault(name, ServerFacts(name))
        crashes = self.facts.orphans if server is None else server.crashes
        key = (fault.code if fault is not None else "resources", sentence)
        known = crashes.get(key)
        if known is not None:
            known.ranks.add(hit.line.rank)
            known.inside = known.inside or frame is not None
        elif len(crashes) < _MAX_CRASHES:
            start = server.start if server is not None else None
            crashes[key] = Crash(
                fault, sentence, resources, frame is not None, raised, hit.where, {hit.line.rank}, start
            )

    def _dense(self, event: say.DenseConfigMissing, hit: Hit) -> None:
        if len(self.facts.dense) < _MAX_SHAPES:
            self.facts.dense.setdefault(event.file, hit.where)

    def _ready(self, event: say.Ready, hit: Hit) -> None:
        del hit
        # uvicorn's line alone, which any web server prints, makes no vLLM.
        if event.server is not None and (server := self.facts.servers.get(event.server)) is not None:
            server.ready = True

    def _seen(self, event: say.Seen, hit: Hit) -> None:
        del hit
        self._of(event)


_NOTES: dict[type[say.Event], Callable[[LogReader, Any, Hit], None]] = {
    say.Arguments: LogReader._arguments,
    say.Release: LogReader._release,
    say.Architecture: LogReader._architecture,
    say.Limit: LogReader._limit,
    say.GraphSizes: LogReader._graphs,
    say.GraphsOff: LogReader._graphs_off,
    say.AllReduceFusion: LogReader._fusion,
    say.RunnerChosen: LogReader._runner,
    say.FilesIgnored: LogReader._ignored,
    say.PairOverridden: LogReader._override,
    say.TmaEnabled: LogReader._tma,
    say.ConfigFound: LogReader._found,
    say.ConfigStale: LogReader._stale,
    say.ConfigMissing: LogReader._missing,
    say.Frame: LogReader._frame,
    say.OutOfResources: LogReader._resources,
    say.Raised: LogReader._raised,
    say.DenseConfigMissing: LogReader._dense,
    say.Ready: LogReader._ready,
    say.Seen: LogReader._seen,
}
