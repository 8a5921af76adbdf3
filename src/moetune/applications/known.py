"""What was measured of a problem: restored from its journal, and written there before it counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moetune.applications.provenance import rounded
from moetune.applications.targets import Target
from moetune.domain.codec import to_json
from moetune.domain.config import KernelConfig
from moetune.domain.text import printable
from moetune.measure.protocol import Checked, LayerTimed, Peaks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from moetune.applications.journal import Journal
    from moetune.domain.problem import Kernel
    from moetune.measure.protocol import Timed


class Known:
    """Times, failures, layers, checks and peaks.

    Args:
        journal: what is known, and where what comes goes.

    Attributes:
        times: of each target, None where it cannot run.
        spreads: of the times.
        failed: configs that cannot run at any m, with why.
        layers: pairs timed through the whole layer, by what was asked.
        checks: configs compared with the reference, by what was asked.
        peaks: what the GPU can do.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.times: dict[Target, float | None] = {}
        self.spreads: dict[Target, float] = {}
        self.failed: dict[tuple[Kernel, KernelConfig], str] = {}
        self.layers: dict[str, LayerTimed] = {}
        self.checks: dict[str, Checked] = {}
        self.peaks: Peaks | None = None
        self._best: dict[tuple[Kernel, int], float] = {}
        self._restore()

    def best_us(self, target: Target) -> float | None:
        """The best time of a target's kernel at its m."""
        return self._best.get((target.kernel, target.m))

    def times_at(self, kernel: Kernel, m: int, *, in_order: bool = False) -> dict[KernelConfig, float]:
        """Configs that ran, with their times; `in_order`: those that read or write rows in sorted order."""
        return {
            target.config: time_us
            for target, time_us in self.times.items()
            if target.kernel == kernel
            and target.m == m
            and target.in_order is in_order
            and time_us is not None
        }

    def add_time(self, target: Target, timed: Timed, device: int) -> None:
        """A target was measured."""
        values = rounded(to_json(timed))
        self._journal.append(
            "time",
            kernel=target.kernel,
            m=target.m,
            config=target.config.to_json(),
            device=device,
            **({"sorted_output": True} if target.sorted_output else {}),
            **values,
        )
        # As a resumed run will read it: the same times lead to the same questions.
        self._note_time(target, values["time_us"], values["spread"])

    def add_failure(self, kernel: Kernel, config: KernelConfig, why: str, m: int | None) -> None:
        """A config cannot run; it is never tried again, at any m."""
        why = printable(why, 300)
        self._journal.append("failed", kernel=kernel, config=config.to_json(), m=m, why=why)
        self._note_failure(kernel, config, why)

    def add_unable(self, targets: Iterable[Target]) -> None:
        """Targets that cannot run; nothing of that is worth a line."""
        self.times.update(dict.fromkeys(targets))

    def add_layer(self, key: str, timed: LayerTimed) -> None:
        """Pairs were timed through the whole layer."""
        values = rounded(to_json(timed))
        self._journal.append("layer", key=key, **values)
        self.layers[key] = _layer(values)

    def add_layer_failure(self, key: str, why: str) -> None:
        """Pairs could not be timed; they may be asked for again."""
        self._journal.append("layer failed", key=key, why=why)

    def add_check(self, key: str, checked: Checked) -> None:
        """A config was compared with the reference."""
        self._journal.append("check", key=key, **to_json(checked))
        self.checks[key] = checked

    def add_peaks(self, peaks: Peaks) -> None:
        """The GPU's peaks were measured."""
        self.peaks = peaks
        self._journal.append("peaks", **to_json(peaks))

    def _note_time(self, target: Target, time_us: float, spread: float) -> None:
        self.times[target], self.spreads[target] = time_us, spread
        key = (target.kernel, target.m)
        self._best[key] = min(time_us, self._best.get(key, time_us))

    def _note_failure(self, kernel: Kernel, config: KernelConfig, why: str) -> None:
        self.failed[kernel, config] = why
        self.add_unable([t for t in self.times if (t.kernel, t.config) == (kernel, config)])

    def _restore(self) -> None:
        for line in self._journal.lines:
            kind = line.get("kind")
            if kind == "time":
                config, in_order = _config(line["config"]), line.get("sorted_output", False)
                target = Target(line["kernel"], line["m"], config, in_order)
                if (target.kernel, target.config) not in self.failed:
                    self._note_time(target, line["time_us"], line["spread"])
            elif kind == "failed":
                self._note_failure(line["kernel"], _config(line["config"]), line["why"])
            elif kind == "layer":
                self.layers[line["key"]] = _layer(line)
            elif kind == "peaks":
                self.peaks = Peaks(line["tflops"], line["gbps"])
            elif kind == "check":
                self.checks[line["key"]] = Checked(line["relative_error"], line["tolerance"])


def _layer(values: Mapping[str, Any]) -> LayerTimed:
    samples = tuple(tuple(row) for row in values["samples_us"])
    return LayerTimed(samples, values["reuse_bytes"], values["compilations"])


def _config(value: object) -> KernelConfig:
    return KernelConfig.from_json(value, "the journal")
