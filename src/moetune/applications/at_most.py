"""What tuning can give a server at most: the MoE kernels' share of a step, and their distance from the best.

By Amdahl's law a kernel that takes the share `f` of a step and gets `s` times faster saves
`f * (1 - 1 / s)` of it. `f` comes from a trace, where it is measured, or from a server's log and
predicted times, where it is an estimate; `s` is predicted.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from moetune.applications.doctor_reader import LogSource, whole_text
from moetune.applications.provenance import rounded
from moetune.applications.trace import Trace, TracedStep, read_trace
from moetune.domain.choose import Choice
from moetune.domain.errors import InputError
from moetune.domain.step_time import throughput_gain, time_saved
from moetune.domain.text import printable
from moetune.servers.step_lines import NEEDLES, DecodeRate, decode_rate, speculates
from moetune.servers.step_parts import TRITON

if TYPE_CHECKING:
    from moetune.applications.planning import GpuPlan, Plan
    from moetune.applications.predicting import Predicted

SERVING_NOISE = 0.01
"""A change of throughput below it is not told from none: starts of one server differ by 1% to 2%
(sglang-jax issue 1095: 98 against 96.8 to 97.2 on changes that touch nothing)."""

MODEL_ERROR = 0.1
"""How much further from the best the default may be than the model says (docs/model.md: its times
near the best are wrong by about 9% where it was not trained)."""

_STEPS_WITHOUT_PREFILL = 0.9
"""Quantile of the shares that lines of a log give. Prefills between two lines only make steps look
longer, so that the largest shares are those of pure decoding; the very largest are outliers."""

_LEAST_LINES = 5
_MAX_LINE = 1 << 16


class NoStepsError(InputError):
    """A log or a trace from which no step time can be read."""


@dataclass(frozen=True, slots=True)
class PhaseBound:
    """What tuning can save in one phase, of its steps' wall time; parts are 0 to 1.

    Attributes:
        phase: `decode`, `prefill` or `unknown`.
        steps: that it rests on; of a log: lines.
        m: median tokens of a step; None: unknown, and the largest predicted speedup of any m counts.
        wall_us: median wall time of a step.
        share: of the wall time that the MoE kernels take.
        up_us: median of a step's up kernels, None where they cannot be told apart.
        down_us: likewise of the down kernels.
        weight: part of all wall time that is this phase's.
        speedup: predicted time of the server's default over that of the best; None: the default cannot run.
        saved: with that speedup.
        saved_at_most: with the model's error on top.
    """

    phase: str
    steps: int
    m: int | None
    wall_us: float
    share: float
    up_us: float | None
    down_us: float | None
    weight: float
    speedup: float | None
    saved: float | None
    saved_at_most: float | None


@dataclass(frozen=True, slots=True)
class AtMost:
    """The answer for one trace or log.

    Attributes:
        source: the file.
        kind: `traced`: shares are measured; `estimated`: from a log's step times and predicted times.
        gpu: that the predictions are for.
        phases: those with steps.
        runners: runners of the MoE kernels in the trace and their part of the kernels' time.
        saved_if_free: part of the time that would be saved if the kernels took none: no tuning can give more.
        saved: as predicted.
        saved_at_most: with the model's error on top; None where it cannot be said.
        worth: tuning can give more than the noise between two starts of a server.
        reason: that verdict in a sentence.
        problems: why it may rest on less than the whole, in sentences.
    """

    source: str
    kind: Literal["traced", "estimated"]
    gpu: str
    phases: tuple[PhaseBound, ...]
    runners: tuple[tuple[str, float], ...]
    saved_if_free: float
    saved: float | None
    saved_at_most: float | None
    worth: bool
    reason: str
    problems: tuple[str, ...] = ()

    @property
    def gain_at_most(self) -> float | None:
        """Factor of throughput, None where it cannot be said."""
        return None if self.saved_at_most is None else throughput_gain(self.saved_at_most)

    def to_json(self) -> dict[str, Any]:
        """As it stands in the document of `plan`."""
        document: dict[str, Any] = rounded(
            {
                "source": self.source,
                "kind": self.kind,
                "gpu": self.gpu,
                "saved_if_free": self.saved_if_free,
                "saved": self.saved,
                "saved_at_most": self.saved_at_most,
                "gain_at_most": self.gain_at_most,
                "worth": self.worth,
                "reason": self.reason,
                "runners": dict(self.runners),
                "phases": [
                    {name: getattr(phase, name) for name in PhaseBound.__dataclass_fields__}
                    for phase in self.phases
                ],
                "problems": list(self.problems),
            }
        )
        return document


def bounds(plan: Plan, traces: Sequence[str], logs: Sequence[str]) -> tuple[AtMost, ...]:
    """What tuning can give at most, by each trace and each log.

    Args:
        plan: for the one GPU on which they were taken.
        traces: files of torch's profiler.
        logs: of the server.

    Raises:
        InputError: for several GPUs, and for what cannot be read.
    """
    if len(plan.gpus) != 1:
        names = ", ".join(part.gpu.torch_name for part in plan.gpus)
        raise InputError(
            f"a trace or a log is of one kind of GPU, and this plan has {len(plan.gpus)}: {names}",
            "name that one with --gpu",
        )
    part = plan.gpus[0]
    found = [bound_of_trace(trace, part) for trace in traces]
    return (*found, *(bound_of_log(log, part, plan.layer.num_moe_layers) for log in logs))


def bound_of_trace(path: str | Path, part: GpuPlan) -> AtMost:
    """What tuning can give at most, by a trace of the server.

    Args:
        path: of a torch-profiler trace of one rank.
        part: the plan for the GPU on which it was taken.

    Raises:
        TraceError: for what is no such trace.
    """
    trace = read_trace(path)
    steps = [step for step in trace.steps if step.time.moe_kernels]
    total = sum(spent for _, spent in trace.runners)
    runners = tuple((runner, spent / total if total else 0.0) for runner, spent in trace.runners)
    if not steps:
        return _nothing(trace, part, runners, _no_kernels(trace))
    tunable = dict(runners).get(TRITON, 0.0)
    if not tunable:
        names = " and ".join(name for name, _ in runners)
        return _nothing(trace, part, runners, f"the experts run on {names}, which reads no tuned files")
    walls = sum(step.time.wall_us for step in steps)
    groups: dict[str, list[TracedStep]] = {}
    for step in steps:
        groups.setdefault(step.phase, []).append(step)
    speedup = _speedups(part)
    phases = tuple(
        _traced_phase(phase, members, walls, tunable, speedup) for phase, members in groups.items()
    )
    problems = list(trace.problems)
    if trace.how != "named":
        where = "replays of CUDA graphs" if trace.how == "graphs" else "the whole trace as one step"
        problems.append(f"the server names no steps in it: {where} stand for them")
    return _answer(trace.path, "traced", part, phases, runners, problems)


def bound_of_log(path: str | Path, part: GpuPlan, moe_layers: int | None) -> AtMost:
    """What tuning can give at most in decoding, estimated from a server's log.

    Args:
        path: of the log.
        part: the plan for the GPU on which the server ran.
        moe_layers: layers with experts that one rank holds.

    Raises:
        NoStepsError: when the log does not say how fast the server decodes, or the layers are unknown.
    """
    name = printable(str(path), 200)
    if part.predicted is None:
        return _answer(name, "estimated", part, (), (), [part.reason])
    if not moe_layers:
        raise NoStepsError(
            "how many layers have experts is unknown for this model", "give its config.json as MODEL"
        )
    rates, problems = _rates(str(path))
    entries = part.predicted.choices.entries
    shares = []
    for rate in rates:
        time_us = _nearest(entries, rate.running).default_us
        if time_us is not None:
            shares.append((min(1.0, moe_layers * time_us / rate.step_us), rate))
    if not shares:
        raise NoStepsError(
            f"the server's default cannot run on {part.gpu.torch_name}: its share of a step is unknown",
            "give a profiler trace with --trace",
        )
    shares.sort(key=lambda pair: pair[0])
    share, rate = shares[min(len(shares) - 1, int(_STEPS_WITHOUT_PREFILL * len(shares)))]
    entry = _nearest(entries, rate.running)
    bound = PhaseBound(
        phase="decode",
        steps=len(shares),
        m=int(statistics.median(pair[1].running for pair in shares)),
        wall_us=rate.step_us,
        share=share,
        up_us=None,
        down_us=None,
        weight=1.0,
        speedup=entry.speedup,
        **_saved(share, entry.speedup),
    )
    return _answer(name, "estimated", part, (bound,), ((TRITON, 1.0),), problems)


Speedup = Callable[["int | None"], "float | None"]


def _speedups(part: GpuPlan) -> Speedup:
    """Predicted distance of the default from the best at some tokens; the largest where they are unknown."""
    predicted: Predicted | None = part.predicted
    if predicted is None:
        return lambda _: None
    entries = predicted.choices.entries
    known = [entry.speedup for entry in entries if entry.speedup is not None]

    def speedup(m: int | None) -> float | None:
        if m is None:
            return max(known) if len(known) == len(entries) else None
        return _nearest(entries, m).speedup

    return speedup


def _nearest(entries: Sequence[Choice], m: int) -> Choice:
    return min(entries, key=lambda entry: (abs(entry.m - m), entry.m))


def _traced_phase(
    phase: str, steps: Sequence[TracedStep], walls: float, tunable: float, speedup: Speedup
) -> PhaseBound:
    wall = sum(step.time.wall_us for step in steps)
    share = tunable * sum(step.time.moe_us for step in steps) / wall
    tokens = [step.tokens for step in steps if step.tokens is not None]
    m = int(statistics.median(tokens)) if tokens else None
    ups = [step.time.up_us for step in steps if step.time.up_us is not None]
    downs = [step.time.down_us for step in steps if step.time.down_us is not None]
    factor = speedup(m)
    return PhaseBound(
        phase=phase,
        steps=len(steps),
        m=m,
        wall_us=statistics.median(step.time.wall_us for step in steps),
        share=share,
        up_us=statistics.median(ups) if ups else None,
        down_us=statistics.median(downs) if downs else None,
        weight=wall / walls,
        speedup=factor,
        **_saved(share, factor),
    )


def _saved(share: float, speedup: float | None) -> Mapping[str, Any]:
    if speedup is None:
        return {"saved": None, "saved_at_most": None}
    at_most = max(1.0, speedup) * (1.0 + MODEL_ERROR)
    return {"saved": time_saved(share, max(1.0, speedup)), "saved_at_most": time_saved(share, at_most)}


def _answer(
    source: str,
    kind: Literal["traced", "estimated"],
    part: GpuPlan,
    phases: tuple[PhaseBound, ...],
    runners: tuple[tuple[str, float], ...],
    problems: Sequence[str],
) -> AtMost:
    free = sum(phase.weight * phase.share for phase in phases)
    saved = _weighted([(phase.weight, phase.saved) for phase in phases])
    at_most = _weighted([(phase.weight, phase.saved_at_most) for phase in phases])
    limit = throughput_gain(at_most if at_most is not None else free) - 1.0
    worth = bool(phases) and limit > SERVING_NOISE
    noise = f"{100 * SERVING_NOISE:g}%, what two starts of one server differ by"
    if not phases:
        reason = problems[0] if problems else "nothing can be said"
    elif worth:
        what = "throughput" if at_most is not None else "throughput, were the kernels to take no time,"
        reason = f"tuning can give {what} at most {100 * limit:.1f}%"
    else:
        reason = f"not worth tuning: at most {100 * limit:.1f}%, no more than the noise ({noise})"
    return AtMost(
        source=source,
        kind=kind,
        gpu=part.gpu.torch_name,
        phases=phases,
        runners=runners,
        saved_if_free=free,
        saved=saved,
        saved_at_most=at_most,
        worth=worth,
        reason=reason,
        problems=tuple(problems) if phases else (),
    )


def _weighted(parts: Sequence[tuple[float, float | None]]) -> float | None:
    values = [(weight, value) for weight, value in parts if value is not None]
    return sum(weight * value for weight, value in values) if parts and len(values) == len(parts) else None


def _nothing(trace: Trace, part: GpuPlan, runners: tuple[tuple[str, float], ...], reason: str) -> AtMost:
    return AtMost(
        trace.path, "traced", part.gpu.torch_name, (), runners, 0.0, 0.0, 0.0, False, reason, trace.problems
    )


def _no_kernels(trace: Trace) -> str:
    longest = ", ".join(f"{name} ({spent / 1e3:.1f} ms)" for name, spent in trace.top_kernels[:3])
    text = "no kernel of the trace is one of an MoE layer that moetune knows"
    return f"{text}; the longest others are {longest}" if longest else text


def _rates(name: str) -> tuple[list[DecodeRate], list[str]]:
    source = LogSource(name)
    rates, speculative, rest = [], False, b""
    for chunk in whole_text(source):
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()[-_MAX_LINE:]
        for raw in lines:
            speculative = speculative or (
                b"SpecDecoding" in raw and speculates(raw.decode("utf-8", "replace"))
            )
            if any(needle in raw for needle in NEEDLES):
                rate = decode_rate(raw[:_MAX_LINE].decode("utf-8", "replace"))
                if rate is not None:
                    rates.append(rate)
    shown = printable(name, 200)
    if speculative or any(rate.accept_length is not None for rate in rates):
        raise NoStepsError(
            f"{shown}: the server decodes speculatively, and its log does not say how many tokens a step has",
            "give a profiler trace with --trace",
        )
    if len(rates) < _LEAST_LINES:
        raise NoStepsError(
            f"{shown} holds {len(rates)} lines on how fast the server decodes, {_LEAST_LINES} are the least",
            "give the log of a server under load, or a profiler trace with --trace",
        )
    return rates, list(source.problems)
