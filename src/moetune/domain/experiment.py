"""What an experiment hands from step to step: starts, what the server ran, loads, verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to run the server.

    Attributes:
        name: `baseline`, the name of an intervention, or `all that helped`.
        interventions: names of those that are on in it; none: the baseline.
    """

    name: str
    interventions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduledStart:
    """One start of the server, in the order in which they run.

    Attributes:
        block: starts of one block share its baseline.
        position: in the block.
        arm: name of the arm.
    """

    block: int
    position: int
    arm: str


@dataclass(frozen=True, slots=True)
class ConfigRead:
    """What a server's lookup ended with for one kernel.

    Attributes:
        kernel: `up` or `down`.
        file: bare name of the file that was looked for.
        outcome: `exact`, `stale`, `reused up`, `default` or `ignored`.
        path: as the log names what was read, empty when the default runs.
    """

    kernel: str
    file: str
    outcome: str
    path: str = ""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a start really ran, read from its log and its endpoints; unknown is None or empty.

    Attributes:
        server: `sglang`, `vllm` or `other`.
        version: of the server.
        triton_version: as far as a path or the server says it.
        gpus: names.
        arguments: resolved arguments, name to value as printed; ports, paths of logs and what else
            differs by start are left out.
        runner: the MoE runner, in the server's words.
        configs: what the lookups ended with.
        kv_tokens: tokens that the KV cache holds.
        max_running_requests: most requests under way.
        prefill_chunk: most tokens of a prefill step.
        decode_graphs: sizes with a graph.
        prefill_graphs: sizes with a graph.
        graphs_off: `(phase, reason)`.
        all_reduce_fusion: `(state, reason)`, the last of a start.
        lines: proof texts that were looked for and stood in the log.
        other: further facts, name to value (a `transformers serve`'s implementation).
    """

    server: str
    version: str = ""
    triton_version: str = ""
    gpus: tuple[str, ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict)
    runner: str = ""
    configs: tuple[ConfigRead, ...] = ()
    kv_tokens: int | None = None
    max_running_requests: int | None = None
    prefill_chunk: int | None = None
    decode_graphs: tuple[int, ...] = ()
    prefill_graphs: tuple[int, ...] = ()
    graphs_off: tuple[tuple[str, str], ...] = ()
    all_reduce_fusion: tuple[str, str] = ("", "")
    lines: tuple[str, ...] = ()
    other: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One pass of the load, as the generator reports it; times are medians unless said.

    Attributes:
        requested: requests of the pass.
        completed: of them, with an answer.
        duration_s: of the pass.
        input_tokens: as the server counted them.
        output_tokens: as the server counted them.
        output_tokens_per_s: throughput.
        requests_per_s: throughput.
        ttft_ms: time to first token.
        itl_ms: between two tokens of a request.
        mean_ttft_ms: mean, beside the median.
        mean_itl_ms: mean, beside the median.
        p99_ttft_ms: 99th percentile.
        p99_itl_ms: 99th percentile.
    """

    requested: int
    completed: int
    duration_s: float
    input_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    ttft_ms: float | None = None
    itl_ms: float | None = None
    mean_ttft_ms: float | None = None
    mean_itl_ms: float | None = None
    p99_ttft_ms: float | None = None
    p99_itl_ms: float | None = None


HIGHER_IS_BETTER: Mapping[str, bool] = {
    "output_tokens_per_s": True,
    "requests_per_s": True,
    "ttft_ms": False,
    "itl_ms": False,
    "mean_ttft_ms": False,
    "mean_itl_ms": False,
    "p99_ttft_ms": False,
    "p99_itl_ms": False,
}
"""Metrics of a load that can be compared, and which way is good."""


class Ending(str, Enum):
    """How a start ended."""

    DONE = "done"
    CANNOT_START = "cannot start"  # it died or was never ready
    DIED = "died under load"
    LOAD_FAILED = "load failed"  # requests without an answer, or a generator that failed or hung
    CANNOT_STOP = "cannot stop"
    CANNOT_INSTALL = "cannot install"


@dataclass(frozen=True, slots=True)
class StartResult:
    """One start of the server, over.

    Attributes:
        start: which one.
        ending: how it ended.
        passes: measured passes, without the discarded first.
        facts: what really ran, None when it never got that far.
        reason: why it did not end well, for people.
        started_s: wall clock at the start, seconds since 1970.
        ready_s: until it was ready.
        took_s: in all, by a clock that never jumps.
        log: path of its log below the run's folder.
    """

    start: ScheduledStart
    ending: Ending
    passes: tuple[LoadResult, ...] = ()
    facts: ServerFacts | None = None
    reason: str = ""
    started_s: float = 0.0
    ready_s: float = 0.0
    took_s: float = 0.0
    log: str = ""


@dataclass(frozen=True, slots=True)
class Difference:
    """Something in which an arm differs from the baseline.

    Attributes:
        what: name of the fact (`max_running_requests`, `argument tp_size`, ...).
        baseline: its value there.
        arm: its value in the arm.
        declared: it is the intervention itself or a consequence that the table or the plan declares.
    """

    what: str
    baseline: str
    arm: str
    declared: bool


class Proof(str, Enum):
    """Whether an intervention was seen to be active."""

    ACTIVE = "active"
    REFUSED = "refused"  # the server says that it does not do it
    NOT_SEEN = "not seen"  # the log would show it and does not
    NO_LINE = "no line"  # this server prints nothing about it: its resolved argument stands for it


@dataclass(frozen=True, slots=True)
class Validity:
    """Whether the starts of an arm can be compared with the baseline's.

    Attributes:
        differences: declared and undeclared.
        proof: that the interventions were active.
        evidence: the lines or arguments that show it, or that refuse it.
        problems: why the comparison is INVALID, one sentence each; empty: it is valid.
    """

    differences: tuple[Difference, ...] = ()
    proof: Proof = Proof.ACTIVE
    evidence: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def valid(self) -> bool:
        """Whether numbers may be judged."""
        return not self.problems


class Verdict(str, Enum):
    """What is known of an arm."""

    HELPS = "helps"
    HURTS = "hurts"
    EQUIVALENT = "equivalent"
    INCONCLUSIVE = "inconclusive"
    INVALID = "INVALID"
    CANNOT_ACTIVATE = "cannot activate"
    FAILED = "failed"  # it never ran to the end


Direction = Literal["higher", "lower"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of an arm against the baseline, by paired blocks.

    Attributes:
        metric: field of `LoadResult`.
        ratio: arm / baseline, the mean of the blocks' that outliers cannot move far: where the statistic of
            the test is zero.
        low: of its interval.
        high: of its interval.
        level: of that interval.
        blocks: pairs that it rests on.
        p_value: exact, two-sided, None below two blocks.
        baseline: median of the baseline's starts.
        arm: median of the arm's starts.
    """

    metric: str
    ratio: float
    low: float
    high: float
    level: float
    blocks: int
    p_value: float | None
    baseline: float
    arm: float


@dataclass(frozen=True, slots=True)
class Judgement:
    """What an experiment says of one arm.

    Attributes:
        arm: name.
        verdict: of its deciding metric, or why there is none.
        comparisons: deciding metric first, then the others that were reported.
        validity: of its starts.
        smallest_effect: that this number of starts could have found, None when nothing was measured.
        notes: drift, outliers, mean against median, one sentence each.
        decided: nothing that is still scheduled can change the verdict.
    """

    arm: str
    verdict: Verdict
    comparisons: tuple[Comparison, ...] = ()
    validity: Validity = Validity()
    smallest_effect: float | None = None
    notes: tuple[str, ...] = ()
    decided: bool = False
