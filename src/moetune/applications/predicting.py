"""From a problem to predicted config tables: what can run, ranked, chosen, and looked at between the keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moetune.applications.provenance import rounded
from moetune.domain.choose import Candidates, Choices, DefaultConfig, Pair, Point
from moetune.domain.codec import to_json
from moetune.domain.coverage import Shortfall, choose_covering
from moetune.domain.errors import ConfigFileError, MoetuneError
from moetune.domain.familiarity import Familiarity
from moetune.domain.keys import Keys, m_keys
from moetune.domain.predict import PerformanceModel, Prediction
from moetune.domain.problem import KERNELS, Kernel
from moetune.domain.space import can_run, dtype_violation, search_axes, violations
from moetune.domain.version import parse_release
from moetune.servers.other_kernel import cuda_kernel_text, cuda_kernel_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moetune.domain.choose import Choice
    from moetune.domain.config import KernelConfig
    from moetune.domain.launch import Launch
    from moetune.domain.problem import Problem
    from moetune.servers.protocol import Server

NOISE = 0.013
"""Relative difference of two times below which nothing is claimed. 95% of the repeats of one and the
same schedule lie within it: GROUP_SIZE_M 16, 32 and 64 at m = 2 in the recorded landscapes (H200,
2026-12-01)."""

Rejected = frozenset[tuple[Kernel, "KernelConfig"]]
"""Configs of a kernel that turned out not to compile."""


_Answer = tuple[float, float, str, tuple[float, ...]]
"""Time in microseconds, score, what limits a launch, and the time as each member of the model sees it."""


class NothingFitsError(MoetuneError):
    """No config at all can run: a person should know why, and there is nothing to tune."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predicted tables of one problem.

    Attributes:
        choices: the pair of configs for each key, with predicted times.
        keys: the keys that were asked for, and the traffic over which means are taken.
        limits: for each key what limits the up and the down kernel.
        added_keys: keys that were added, since between others an entry would have lost.
        shortfalls: m at which the default would still be faster; none as a rule.
        familiarity: how far the problem lies from what the model has seen.
        ranked: number of configs that were ranked, by kernel.
        refused: constraints that keep configs out, with the number of configs of the up kernel.
    """

    choices: Choices
    keys: Keys
    limits: Mapping[int, tuple[str, str]]
    added_keys: tuple[int, ...]
    shortfalls: tuple[Shortfall, ...]
    familiarity: Familiarity
    ranked: Mapping[Kernel, int]
    refused: Mapping[str, int]

    @property
    def gain(self) -> float | None:
        """Geometric mean over the traffic of the default's time over the chosen one's."""
        return self.choices.geomean_speedup(self.keys.traffic)

    def to_json(self) -> dict[str, Any]:
        """As it stands in the documents of `plan` and `tune`."""
        document: dict[str, Any] = rounded(
            {
                "noise": NOISE,
                "l2": "cold",
                "routing": "uniform",
                "one_file": self.choices.one_file,
                "gain": self.gain,
                "traffic": [list(pair) for pair in self.keys.traffic],
                "familiarity": to_json(self.familiarity),
                "ranked": dict(self.ranked),
                "refused": dict(self.refused),
                "added_keys": list(self.added_keys),
                "shortfalls": [shortfall.m for shortfall in self.shortfalls],
                "entries": [self._entry(choice) for choice in self.choices.entries],
            }
        )
        return document

    def _entry(self, choice: Choice) -> dict[str, Any]:
        up, down = self.limits[choice.m]
        return {
            **choice.to_json(),
            "up": choice.pair.up.to_json(),
            "down": choice.pair.down.to_json(),
            "limits": {"up": up, "down": down},
        }


class Forecast:
    """What the performance model says about one problem on one server, asked once for each m.

    Args:
        server: the release whose launches and defaults count.
        problem: the problem.
        model: the performance model.
        start_from: configs to look at beside those of the search space.

    Raises:
        NothingFitsError: when no config can run at all.
    """

    def __init__(
        self,
        server: Server,
        problem: Problem,
        model: PerformanceModel,
        start_from: Sequence[KernelConfig] = (),
    ) -> None:
        self._server, self._problem, self._model = server, problem, model
        self._start_from = start_from
        self._triton = parse_release(server.triton_version)
        self.refused: Counter[str] = Counter()
        self._launches = {kernel: self._worth_trying(kernel) for kernel in KERNELS}
        self._configs = {
            kernel: tuple(launch.config for launch in launches) for kernel, launches in self._launches.items()
        }
        self._predictions: dict[tuple[Kernel, int], Prediction] = {}
        self._answers: dict[tuple[Kernel, int], dict[Launch, _Answer]] = {}
        self._runnable: dict[tuple[Kernel, Pair], Launch | None] = {}

    def tables(self, keys: Keys, largest_m: int, rejected: Rejected = frozenset()) -> Predicted:
        """Choose the tables.

        Args:
            keys: for which m.
            largest_m: the largest m that the server can meet.
            rejected: configs to leave out.
        """
        covered = choose_covering(
            keys.ms,
            lambda m: self._point(m, rejected),
            self._default,
            lambda m, pairs: self._times_us(m, pairs, rejected),
            switches=self._server.default_switches(self._problem),
            largest_m=largest_m,
            one_file=not self._server.separate_down_file,
            noise=NOISE,
            # On a GPU unlike any that was measured the members of the model disagree, and one of four
            # would veto what the others see gain 25%. Their disagreement is in the score already.
            veto=False,
            first_m=keys.ms[0],
        )
        return Predicted(
            choices=covered.choices,
            keys=keys,
            limits={
                choice.m: (self._limit("up", choice), self._limit("down", choice))
                for choice in covered.choices.entries
            },
            added_keys=covered.added,
            shortfalls=covered.shortfalls,
            familiarity=self._model.familiarity(self._problem),
            ranked={kernel: len(configs) for kernel, configs in self._configs.items()},
            refused=dict(sorted(self.refused.items())),
        )

    def launches(self, kernel: Kernel) -> tuple[Launch, ...]:
        """The search space of a kernel: what violates nothing."""
        return self._launches[kernel]

    def _worth_trying(self, kernel: Kernel) -> tuple[Launch, ...]:
        """Launches of the search space that violate nothing, each config once."""
        gpu = self._problem.gpu
        reasons: dict[KernelConfig, str] = {}
        seen: set[KernelConfig] = set()
        launches = []
        measured = self._model.familiarity(self._problem).distance < 1
        for asked in (*search_axes(gpu, measured=measured).grid(), *self._start_from):
            try:
                launch = self._server.launch(self._problem, kernel, asked)
            except ConfigFileError:
                self.refused["refused by the server"] += kernel == "up"
                continue
            # What the server would change stands as it will run.
            config = launch.config
            if config in seen:
                continue
            seen.add(config)
            # No constraint looks at how blocks are grouped.
            shape = replace(config, group_size_m=1)
            if shape not in reasons:
                found = violations(replace(launch, config=shape), gpu, self._triton)
                reasons[shape] = found[0].constraint.name if found else ""
            if not reasons[shape]:
                launches.append(launch)
            elif kernel == "up":
                self.refused[reasons[shape]] += 1
        if not launches:
            raise NothingFitsError(f"no config of the search space can run on {gpu.torch_name}")
        return tuple(launches)

    def _prediction(self, kernel: Kernel, m: int) -> Prediction:
        key = (kernel, m)
        if key not in self._predictions:
            self._predictions[key] = self._model.predict(self._problem, kernel, m, self._launches[kernel])
        return self._predictions[key]

    def _candidates(self, kernel: Kernel, m: int, rejected: Rejected) -> Candidates:
        prediction = self._prediction(kernel, m)
        configs = self._configs[kernel]
        times, scores, scenarios = prediction.time_us, prediction.score, prediction.scenarios_us
        if any(of_kernel == kernel for of_kernel, _ in rejected):
            kept = [place for place, config in enumerate(configs) if (kernel, config) not in rejected]
            configs = tuple(configs[place] for place in kept)
            times, scores, scenarios = times[kept], scores[kept], scenarios[:, kept]
        return Candidates(configs, times.tolist(), scores.tolist(), scenarios.tolist())

    def _point(self, m: int, rejected: Rejected) -> Point:
        pair = self._default(m)
        return Point(
            m=m,
            up=self._candidates("up", m, rejected),
            down=self._candidates("down", m, rejected),
            default_up=self._default_config("up", pair, m, rejected),
            default_down=self._default_config("down", pair, m, rejected),
        )

    def _default(self, m: int) -> Pair:
        up = self._server.default_config(self._problem, "up", m)
        return Pair(up, self._server.default_config(self._problem, "down", m))

    def _default_config(self, kernel: Kernel, pair: Pair, m: int, rejected: Rejected) -> DefaultConfig:
        config = pair.up if kernel == "up" else pair.down
        (found,) = self._ask(kernel, m, (pair,), rejected)
        if found is None:
            return DefaultConfig(config, None)
        time_us, score, _, scenarios_us = found
        return DefaultConfig(config, time_us, score, scenarios_us)

    def _times_us(self, m: int, pairs: Sequence[Pair], rejected: Rejected) -> list[float | None]:
        """Up and down together; None where one of them cannot run."""
        both = zip(*(self._ask(kernel, m, pairs, rejected) for kernel in KERNELS), strict=True)
        return [None if up is None or down is None else up[0] + down[0] for up, down in both]

    def _limit(self, kernel: Kernel, choice: Choice) -> str:
        (found,) = self._ask(kernel, choice.m, (choice.pair,), frozenset())
        return "" if found is None else found[2]

    def _ask(self, kernel: Kernel, m: int, pairs: Sequence[Pair], rejected: Rejected) -> list[_Answer | None]:
        """Time, score and limit of one kernel of some pairs; None for what cannot run."""
        launches = [self._launch(kernel, pair, rejected) for pair in pairs]
        answers = self._answers.setdefault((kernel, m), {})
        missing = tuple({launch: None for launch in launches if launch is not None and launch not in answers})
        if missing:
            prediction = self._model.predict(self._problem, kernel, m, missing)
            for place, launch in enumerate(missing):
                answers[launch] = (
                    float(prediction.time_us[place]),
                    float(prediction.score[place]),
                    prediction.limits[place],
                    tuple(prediction.scenarios_us[:, place].tolist()),
                )
        return [None if launch is None else answers[launch] for launch in launches]

    def _launch(self, kernel: Kernel, pair: Pair, rejected: Rejected) -> Launch | None:
        """The launch of one kernel of a pair; None where it cannot run."""
        config = pair.up if kernel == "up" else pair.down
        if (kernel, config) in rejected:
            return None
        key = (kernel, pair)
        if key not in self._runnable:
            self._runnable[key] = None
            try:
                launch = self._server.launch(
                    self._problem, kernel, config, pair.up if kernel == "down" else None
                )
            except ConfigFileError:
                return None
            if can_run(launch, self._problem.gpu, self._triton):
                self._runnable[key] = launch
        return self._runnable[key]


def keys_for(server: Server, problem: Problem, largest_m: int, own: Sequence[tuple[int, float]]) -> Keys:
    """The keys of a problem's tables: the m at which the server runs its Triton kernel.

    Raises:
        NothingFitsError: where it runs another kernel at all of them.
    """
    until = cuda_kernel_until(server, problem)
    asked = max((m for m, _ in own), default=largest_m)
    if asked <= until:
        raise NothingFitsError(f"nothing to tune up to m = {asked} ({cuda_kernel_text(server, problem)})")
    return m_keys(server.default_switches(problem), largest_m, own, until + 1)


def forecast(
    server: Server,
    problem: Problem,
    model: PerformanceModel | None = None,
    start_from: Sequence[KernelConfig] = (),
) -> Forecast:
    """Prepare the predictions of a problem; `start_from` adds candidates to the search space.

    Raises:
        NothingFitsError: when no config can run at all, with the reason.
    """
    violation = dtype_violation(problem.quantization.dtype, problem.gpu)
    if violation is not None:
        raise NothingFitsError(violation.text)
    return Forecast(server, problem, PerformanceModel.load() if model is None else model, start_from)
