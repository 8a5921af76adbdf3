"""Makes tables of another GPU, server or Triton version safe: kept, repaired, filled, dropped."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from moetune.applications.predicting import NOISE
from moetune.domain.config import ConfigTable, KernelConfig
from moetune.domain.errors import ConfigFileError
from moetune.domain.keys import m_keys
from moetune.domain.problem import KERNELS
from moetune.domain.rules import Stretch, nearest_runnable, uncovered
from moetune.domain.space import dtype_violation
from moetune.servers.other_kernel import cuda_kernel_text, cuda_kernel_until, own_entries

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from moetune.applications.lint_file import FileJudge
    from moetune.domain.predict import PerformanceModel
    from moetune.domain.problem import Kernel, Problem
    from moetune.servers.protocol import Server

_SPLIT_K = "SPLIT_K"
_CLUSTERS = "num_ctas"


class Action(str, Enum):
    """What became of the entry of one m."""

    KEPT = "kept"
    CLEANED = "keys changed"
    REPAIRED = "repaired"
    FILLED = "the server's default"
    STRETCHED = "as its neighbour"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Change:
    """One entry of one kernel: what it was, what it is, and why.

    Attributes:
        kernel: `up` or `down`; `both` where one file serves both.
        m: the key.
        action: what became of it.
        before: the entry as it was read; None where there was none.
        after: the entry as it is written; None where it was dropped.
        why: the reason.
    """

    kernel: str
    m: int
    action: Action
    before: KernelConfig | None
    after: KernelConfig | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Borrowing:
    """Tables made safe.

    Attributes:
        up: empty when nothing was left.
        down: None where the server reads one file for both kernels, or only the up file was there.
        changes: every entry, by m, up before down.
        predicted: the performance model chose among repairs and fillings.
    """

    up: ConfigTable
    down: ConfigTable | None
    changes: tuple[Change, ...]
    predicted: bool


@dataclass(frozen=True, slots=True)
class _Pair:
    up: KernelConfig
    down: KernelConfig


class Borrower:
    """Makes tables safe for one problem on one server.

    Args:
        server: the target's release.
        problem: the target's problem.
        judge: the target's rules.
        same_gpu: the tables were tuned on the very GPU.
        same_vendor: on a GPU of the same vendor, whose launch options may be kept.
        max_m: the largest m that the server can meet.
        model: the performance model; None where K and topk are not known: then nothing is repaired.
        shared_with: problems that the server would read the same file for: entries must be safe there too.
    """

    def __init__(
        self,
        server: Server,
        problem: Problem,
        judge: FileJudge,
        *,
        same_gpu: bool,
        same_vendor: bool,
        max_m: int,
        model: PerformanceModel | None,
        shared_with: Sequence[Problem] = (),
    ) -> None:
        self._server, self._problem, self._judge = server, problem, judge
        self._problems = (problem, *shared_with)
        self._same_gpu, self._same_vendor = same_gpu, same_vendor
        self._max_m, self._model = max_m, model
        self._allowed = server.allowed_keys(problem)
        self._until = cuda_kernel_until(server, problem)
        self._no_dot = dtype_violation(problem.quantization.dtype, problem.gpu)

    def forget_model(self) -> None:
        """Go on without predictions: the model does not know the GPU's numbers."""
        self._model = None

    def make(self, up: ConfigTable, down: ConfigTable | None) -> Borrowing:
        """Make the tables of a pair, or of one file, safe."""
        in_pair = down is not None and len(down) > 0 and self._server.separate_down_file
        if down is not None and len(down) > 0 and not in_pair:
            up = self._better_of(up, down)
        pairs: dict[int, _Pair] = {}
        changes: dict[tuple[int, str], Change] = {}
        changes |= self._own_entries(up)
        asked = {*up.keys(), *(down.keys() if in_pair and down else ())}
        ms = sorted(m for m in asked if m > self._until)
        for m in ms:
            of_up = up.nearest(m)
            of_down = down.nearest(m) if in_pair and down is not None else of_up
            made = self._entry(m, of_up, of_down, in_pair)
            changes |= {(m, change.kernel): change for change in made[1]}
            if made[0] is not None:
                pairs[m] = made[0]
        if pairs and self._until < self._max_m:
            for place, filled in self._fill(pairs, in_pair).items():
                dropped = changes.get(place)
                changes[place] = filled if dropped is None else _instead(dropped, filled)
        tables = ConfigTable.of((m, pair.up) for m, pair in pairs.items())
        downs = ConfigTable.of((m, pair.down) for m, pair in pairs.items()) if in_pair and pairs else None
        ordered = sorted(changes.values(), key=lambda change: (change.m, change.kernel == "down"))
        return Borrowing(tables, downs, tuple(ordered), self._model is not None)

    def _better_of(self, up: ConfigTable, down: ConfigTable) -> ConfigTable:
        """One table for both kernels from the two of a pair: at each m the entry that serves both better."""
        if self._model is None:
            return up
        chosen = {}
        for m, config in up.entries:
            if m < 1:
                continue
            both = [one for one in dict.fromkeys((config, down.nearest(m))) if not self._unfit(one)]
            times = [self._time_us(m, _Pair(one, one)) for one in both]
            chosen[m] = both[times.index(min(times))] if both else config
        return ConfigTable.of(chosen)

    def _unfit(self, config: KernelConfig) -> bool:
        return bool(self._why_not(self._clean(config, in_pair=False)[0], KERNELS)) or config.use_tma

    def _own_entries(self, table: ConfigTable) -> dict[tuple[int, str], Change]:
        """What becomes of entries at which the server runs a CUDA kernel of its own."""
        own = dict(own_entries(self._server, self._problem))
        why = cuda_kernel_text(self._server, self._problem)
        before = {m: config for m, config in table.entries if 1 <= m <= self._until}
        return {
            (m, "both"): Change(
                "both",
                m,
                Action.FILLED if m in own else Action.DROPPED,
                before.get(m),
                own.get(m),
                f"{why}, with the tile that it chooses itself",
            )
            for m in {**own, **before}
        }

    # one entry

    def _entry(
        self, m: int, of_up: KernelConfig, of_down: KernelConfig, in_pair: bool
    ) -> tuple[_Pair | None, list[Change]]:
        up, up_notes = self._clean(of_up, in_pair)
        if not in_pair:
            return self._shared_entry(m, of_up, up, up_notes)
        down, down_notes = self._clean(of_down, in_pair)
        new_up, why_up = self._repair(m, up, ("up",))
        if new_up is None:
            gone = f"cannot be used: {why_up}"
            dropped = [
                Change(kernel, m, Action.DROPPED, was, None, gone)
                for kernel, was in (("up", of_up), ("down", of_down))
            ]
            return None, dropped
        new_down, why_down = self._follow(m, down, new_up)
        if new_down is None:
            gone = f"cannot be used: {why_down}"
            return None, [
                Change("up", m, Action.DROPPED, of_up, None, f"its down entry {gone}"),
                Change("down", m, Action.DROPPED, of_down, None, gone),
            ]
        return _Pair(new_up, new_down), [
            _change("up", m, of_up, up, new_up, up_notes, why_up),
            _change("down", m, of_down, down, new_down, down_notes, why_down),
        ]

    def _shared_entry(
        self, m: int, before: KernelConfig, cleaned: KernelConfig, notes: list[str]
    ) -> tuple[_Pair | None, list[Change]]:
        kernel = "up" if self._server.separate_down_file else "both"
        after, why = self._repair(m, cleaned, KERNELS)
        if after is None:
            return None, [Change(kernel, m, Action.DROPPED, before, None, f"cannot be used: {why}")]
        return _Pair(after, after), [_change(kernel, m, before, cleaned, after, notes, why)]

    def _clean(self, config: KernelConfig, in_pair: bool) -> tuple[KernelConfig, list[str]]:
        """Without keys that the target refuses, or that were tuned for another GPU."""
        notes = []
        kept = []
        for key, value in config.extra:
            if key == _SPLIT_K:
                if key not in self._allowed:
                    notes.append(f"{key} dropped: {self._server.name} dies of it")
                continue  # written again by a server that needs it
            if key not in self._allowed:
                notes.append(
                    f"{key} dropped: not accepted on {self._problem.gpu.vendor} GPUs by {self._server.name}"
                )
            elif not self._same_vendor or (key == _CLUSTERS and not self._same_gpu):
                notes.append(f"{key} dropped: tuned for another GPU")
            else:
                kept.append((key, value))
        use_tma = config.use_tma
        if use_tma and not ("USE_TMA" in self._allowed and self._same_gpu and in_pair):
            use_tma = False
            notes.append("USE_TMA dropped: kept only in pairs, on the GPU where they were timed")
        cleaned = replace(config, extra=tuple(kept), use_tma=use_tma)
        if kept and (refusal := self._refusal(cleaned)):
            notes.append(f"{', '.join(key for key, _ in kept)} dropped: {refusal}")
            cleaned = replace(cleaned, extra=())
        return cleaned, notes

    def _refusal(self, config: KernelConfig) -> str:
        """Why the server refuses the launch options of an entry on this GPU; empty when it does not."""
        try:
            self._server.render_table(self._problem, ConfigTable(((1, config),)))
        except ConfigFileError as error:
            return error.message
        return ""

    def _why_not(
        self, config: KernelConfig, kernels: Iterable[Kernel], up: KernelConfig | None = None
    ) -> str:
        """What keeps a config from running right; empty when nothing does."""
        if self._no_dot is not None:
            return self._no_dot.text
        for kernel in kernels:
            given = up if kernel == "down" else None
            for problem in self._problems:
                for fault in self._judge.faults_of(problem, kernel, config, given):
                    if fault.fatal:
                        return fault.text
        return ""

    def _repair(
        self, m: int, config: KernelConfig, kernels: Sequence[Kernel]
    ) -> tuple[KernelConfig | None, str]:
        """The config itself where it runs, else the nearest that the model likes best."""
        why = self._why_not(config, kernels)
        if not why:
            return config, ""
        near = nearest_runnable(config, lambda new: not self._why_not(new, kernels))
        return self._best(m, near, kernels), why

    def _follow(self, m: int, down: KernelConfig, up: KernelConfig) -> tuple[KernelConfig | None, str]:
        """The down entry with the up entry's BLOCK_SIZE_M."""
        agreed = replace(down, block_size_m=up.block_size_m)
        why = self._why_not(agreed, ("down",), up)
        if not why:
            said = f"BLOCK_SIZE_M {down.block_size_m} follows the up entry" if agreed != down else ""
            return agreed, said
        near = nearest_runnable(agreed, lambda new: not self._why_not(new, ("down",), up), keep_block_m=True)
        best = self._best(m, near, ("down",))
        if best is None and not self._why_not(up, ("down",), up):
            return replace(up, use_tma=False), f"{why}; the up entry serves both"
        return best, why

    def _best(self, m: int, near: Sequence[KernelConfig], kernels: Sequence[Kernel]) -> KernelConfig | None:
        if not near or self._model is None:
            return None
        scores = [0.0] * len(near)
        for kernel in kernels:
            launches = [self._server.launch(self._problem, kernel, config) for config in near]
            found = self._model.predict(self._problem, kernel, m, launches).score
            scores = [score + float(more) for score, more in zip(scores, found, strict=True)]
        return near[min(range(len(near)), key=lambda place: (scores[place], place))]

    # what lies between the entries

    def _fill(self, pairs: dict[int, _Pair], in_pair: bool) -> dict[tuple[int, str], Change]:
        """Add keys, until every m is served from near by, and by nothing that is worse than the default."""
        changes: dict[tuple[int, str], Change] = {}
        own = ConfigTable.of((m, pair.up) for m, pair in pairs.items())
        far = self._uncovered(pairs)
        switches = self._server.default_switches(self._problem)
        wanted = m_keys(switches, self._max_m, first_m=self._until + 1).ms
        originals = dict(pairs)

        def add(m: int, *, is_far: bool) -> None:
            key = own.nearest_key(m)
            default = self._default(m)
            if default is not None and self._prefers(m, default, originals[key], is_far):
                pairs[m], action, why = default, Action.FILLED, f"m = {m} would use the entry of {key}"
            elif is_far:
                pairs[m], action = originals[key], Action.STRETCHED
                why = "the default cannot run" if default is None else "predicted to beat the default"
            else:
                return
            added = self._added(m, action, pairs[m], why, in_pair)
            changes.update({(m, change.kernel): change for change in added})

        for m in wanted:
            # Without a key of its own the first m of the Triton kernel picks an entry of the other one.
            follows = m == self._until + 1 > 1
            if m not in pairs:
                add(m, is_far=follows or any(part.first <= m <= part.last for part in far))
        # The keys of other tuners do not lie where ours do: what is still far gets the nearest of ours.
        while stretches := self._uncovered(pairs):
            for stretch in stretches:
                add(_key_for(stretch, wanted, pairs), is_far=True)
        return changes

    def _uncovered(self, pairs: Mapping[int, _Pair]) -> list[Stretch]:
        """Stretches that are served from far away, of the m at which the Triton kernel runs."""
        table = ConfigTable.of((m, pair.up) for m, pair in pairs.items())
        return [part for part in uncovered(table, self._max_m) if part.last > self._until]

    def _added(self, m: int, action: Action, pair: _Pair, why: str, in_pair: bool) -> list[Change]:
        if in_pair:
            return [
                Change("up", m, action, None, pair.up, why),
                Change("down", m, action, None, pair.down, why),
            ]
        kernel = "up" if self._server.separate_down_file else "both"
        return [Change(kernel, m, action, None, pair.up, why)]

    def _default(self, m: int) -> _Pair | None:
        """The server's default; None where it cannot run."""
        up, down = (self._server.default_config(self._problem, kernel, m) for kernel in KERNELS)
        if up != down and not self._server.separate_down_file:
            return None  # one file cannot say two configs
        if self._why_not(up, ("up",)) or self._why_not(down, ("down",), up):
            return None
        plain = [
            replace(one, extra=tuple(pair for pair in one.extra if pair[0] != _SPLIT_K)) for one in (up, down)
        ]
        return _Pair(*plain)

    def _prefers(self, m: int, default: _Pair, neighbour: _Pair, is_far: bool) -> bool:
        """Whether the default takes the place of the neighbour's entry at an m without one."""
        if self._model is None:
            return is_far
        ours, theirs = self._time_us(m, neighbour), self._time_us(m, default)
        return theirs * (1 + NOISE) < ours

    def _time_us(self, m: int, pair: _Pair) -> float:
        assert self._model is not None
        total = 0.0
        for kernel in KERNELS:
            config, up = (pair.up, None) if kernel == "up" else (pair.down, pair.up)
            launch = self._server.launch(self._problem, kernel, config, up)
            total += float(self._model.predict(self._problem, kernel, m, (launch,)).time_us[0])
        return total


def _instead(dropped: Change, filled: Change) -> Change:
    """What was dropped and what was filled in at the same m, as one change."""
    return replace(filled, before=dropped.before, why=dropped.why)


def _key_for(stretch: Stretch, wanted: Sequence[int], taken: Container[int]) -> int:
    """A new key that serves a stretch from near by: one of the usual ones where it can be."""
    is_above = stretch.first > stretch.key
    low, high = (stretch.key + 1, stretch.last) if is_above else (stretch.first, stretch.key - 1)
    usual = [m for m in wanted if low <= m <= high and m not in taken]
    fitting = [m for m in usual if m >= stretch.first] if is_above else usual
    return (fitting or usual[-1:] or [stretch.first])[0]


def _change(
    kernel: str,
    m: int,
    before: KernelConfig,
    cleaned: KernelConfig,
    after: KernelConfig,
    notes: list[str],
    why: str,
) -> Change:
    reasons = "; ".join([*notes, *([why] if why else [])])
    if after != cleaned:
        return Change(kernel, m, Action.REPAIRED, before, after, reasons)
    if why:
        return Change(kernel, m, Action.REPAIRED, before, after, reasons)
    return Change(kernel, m, Action.CLEANED if notes else Action.KEPT, before, after, reasons)
