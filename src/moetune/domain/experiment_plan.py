"""The values of an experiment's plan: a server, a load, and the interventions to try on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

BASELINE = "baseline"
"""Name of the arm with no intervention."""

COMBINED = "all that helped"
"""Name of the last arm: every intervention that helped alone, together."""


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """How the known-good server is started, asked and stopped.

    In every argument list `{port}` stands for the port and `{log}` for the log file of a start.

    Attributes:
        name: `sglang`, `vllm`, or `other` for a server whose log and flags moetune does not know.
        command: arguments of the process; no shell reads them.
        environment: variables added to moetune's own.
        version: release of the server, empty when the plan leaves it to the log.
        triton_version: Triton in the server's environment, empty when it is not said.
        host: where the command runs through `ssh HOST`; empty: here.
        port: first port; each start takes the first free one from there on.
        folder: working directory of the command, empty: moetune's own.
        ready_path: endpoint that answers 200 once the server takes requests.
        ready_log: text that the log holds once it does, empty: the endpoint decides alone.
        ready_s: time limit until it is ready.
        stop_s: time between the orderly stop and the hard one.
        stop: arguments of a command that stops the server (`docker stop ...`), empty: signals do.
        logs: arguments of a command that prints the server's log, empty: its output is the log.
        gpus: indices of the GPUs that it uses; empty: all. They have to be free before a start.
        gpu: name of these GPUs, for rules that need it with no GPU here; empty: asked of NVML.
        model: model id or path, empty: taken from the command.
        tp: tensor parallelism, 0: taken from the command.
        config_root: directory whose `configs` (SGLang) or whose files (vLLM) the server reads;
            empty: where `moetune install` would put them.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    triton_version: str = ""
    host: str = ""
    port: int = 30000
    folder: str = ""
    ready_path: str = "/health"
    ready_log: str = ""
    ready_s: float = 1800.0
    stop_s: float = 60.0
    stop: tuple[str, ...] = ()
    logs: tuple[str, ...] = ()
    gpus: tuple[int, ...] = ()
    gpu: str = ""
    model: str = ""
    tp: int = 0
    config_root: str = ""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How the server is loaded: one generator, the same for all arms.

    In every argument `{url}`, `{host}`, `{port}`, `{model}`, `{requests}`, `{concurrency}`, `{input_tokens}`,
    `{output_tokens}`, `{seed}` and `{result}` (the file that the generator has to write) are replaced.

    Attributes:
        generator: `sglang.bench_serving`, `vllm bench serve`, `guidellm`, or `command`.
        command: for `command` its arguments; for the others what starts them, empty: the usual.
        arguments: added to the generator's own.
        environment: variables added to moetune's own.
        folder: working directory of the generator, empty: moetune's own.
        requests: in one pass.
        concurrency: requests under way at a time.
        input_tokens: of each request.
        output_tokens: of each request.
        seed: of the generator's first pass, the same in every start; each pass counts it up, so that no
            answer comes from a cache of prefixes.
        passes: measured passes of a start, after a whole one that is discarded.
        limit_s: time limit of one pass.
        result: field of `LoadResult` to the place in the JSON document of a `command`, as dotted
            names (`metrics.ttft.p50`), with an optional ` * FACTOR` or ` / FACTOR` for units.
    """

    generator: str
    command: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    requests: int = 200
    concurrency: int = 16
    input_tokens: int = 1024
    output_tokens: int = 256
    seed: int = 42
    passes: int = 1
    limit_s: float = 1800.0
    result: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Intervention:
    """One difference from the baseline.

    Attributes:
        name: in the reports; unique in the plan.
        arguments: added to the server's command.
        remove: arguments taken out of the baseline's command, with their values.
        environment: variables that it sets; an empty value takes one out.
        configs: directory or files of a tuned or borrowed table that are put in place for it.
        without_configs: the server's config files for this model are taken away instead.
        proof: text that the server's log has to hold; empty: moetune's own table of proofs decides.
        may_change: names of facts that it changes by its nature, beyond the table's
            (`kv_tokens`, `max_running_requests`, `prefill_graphs`, ...).
        line: of the plan, for messages.
    """

    name: str
    arguments: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    configs: tuple[str, ...] = ()
    without_configs: bool = False
    proof: str = ""
    may_change: tuple[str, ...] = ()
    line: int = 0


@dataclass(frozen=True, slots=True)
class Budget:
    """What an experiment may cost.

    Attributes:
        starts: most starts of a server, 0: as many as `smallest_effect` needs.
        minutes: most time, 0: no limit.
    """

    starts: int = 0
    minutes: float = 0.0


@dataclass(frozen=True, slots=True)
class DecisionPlan:
    """What has to be decided.

    Attributes:
        metric: field of `LoadResult` that decides; the others are reported beside it.
        margin: a change within it is none: "equivalent" only when the interval lies inside.
        smallest_effect: the true change that has to be found with 80% probability.
        noise: expected coefficient of variation between starts; measured in the first blocks.
        alpha: most probability of any wrong claim over the whole experiment.
    """

    metric: str = "output_tokens_per_s"
    margin: float = 0.01
    smallest_effect: float = 0.03
    noise: float = 0.02
    alpha: float = 0.05


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole experiment.

    Attributes:
        name: of the experiment.
        server: the known-good server: the baseline.
        load: the same for all arms.
        interventions: each is tried alone, then together those that helped.
        budget: most starts or minutes.
        decision: what has to be decided.
        seed: of the order of starts.
    """

    name: str
    server: ServerPlan
    load: LoadPlan
    interventions: tuple[Intervention, ...]
    budget: Budget = Budget()
    decision: DecisionPlan = DecisionPlan()
    seed: int = 1

    def intervention(self, name: str) -> Intervention:
        """The intervention of that name.

        Raises:
            KeyError: for a name that the plan lacks.
        """
        return {one.name: one for one in self.interventions}[name]
