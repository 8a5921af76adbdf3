"""The load generators that users have: how each is started and where its numbers are. None is our own.

Whatever the generator: the seed, the lengths of prompts and answers and the number of requests are fixed,
answers do not end early (`ignore_eos`), sampling is greedy, and nothing is downloaded. What a plan adds
with `load.arguments` comes last, so that it overrides.

Flags were read in the published wheels (sglang 0.5.1 to 0.5.23 `bench_serving.py`, `benchmark/serving.py`;
vllm 0.10.2 to 0.33.0 `benchmarks/serve.py`, `benchmarks/datasets`; guidellm 0.3.1 to 0.8.1), and tests hold
them against these files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from moetune.applications.experiments.command_line import fill
from moetune.applications.experiments.load_documents import (
    Reader,
    read_guidellm,
    read_mapped,
    read_sglang,
    read_vllm,
)
from moetune.applications.experiments.load_errors import LoadError
from moetune.domain.experiment_plan import LoadPlan
from moetune.domain.text import printable


@dataclass(frozen=True, slots=True)
class Target:
    """What one pass is sent to, and where its numbers go.

    Attributes:
        url: of the server, as in `http://127.0.0.1:30000`.
        model: as the server is asked for it, also where the generator finds its tokenizer.
        result: path of the file that the generator has to write.
    """

    url: str
    model: str
    result: str


@dataclass(frozen=True, slots=True)
class Generator:
    """One load generator.

    Attributes:
        name: as plans name it.
        start: what starts it unless the plan says otherwise.
        arguments: its own ones for a load and a target.
        read: its document.
        suffix: of the file that it writes.
        owned: flags that keys of the plan set, with these keys.
        length_flags: further flags that change what is sent; with one of them in the plan's arguments the
            number of tokens is no longer known beforehand.
        install: how it is had, for a person who lacks it.
    """

    name: str
    start: tuple[str, ...]
    arguments: Callable[[LoadPlan, Target], tuple[str, ...]]
    read: Reader
    suffix: str
    owned: Mapping[str, str]
    length_flags: frozenset[str]
    install: str


def load_of_pass(load: LoadPlan, number: int) -> LoadPlan:
    """The load of one pass of a start.

    Each pass has its own seed, the same in every start. With one seed for all of them every prompt of a
    later pass would be answered from the prefix cache, and no prefill be measured.

    Args:
        load: of the plan.
        number: 0 for the pass that does not count.
    """
    return replace(load, seed=(load.seed + number) % _SEEDS)


_SEEDS = 1 << 31


def generator_of(load: LoadPlan) -> Generator:
    """The generator of a plan, in the form that its command has."""
    if load.generator == "guidellm" and "benchmark" in load.command:
        return _GUIDELLM_BENCHMARK
    return GENERATORS[load.generator]


def command_of(load: LoadPlan, target: Target) -> tuple[str, ...]:
    """The whole command of one pass."""
    generator = generator_of(load)
    parts = urlsplit(target.url)
    values = {
        "url": target.url,
        "host": parts.hostname or "",
        "port": str(parts.port or 80),
        "model": target.model,
        "requests": str(load.requests),
        "concurrency": str(load.concurrency),
        "input_tokens": str(load.input_tokens),
        "output_tokens": str(load.output_tokens),
        "seed": str(load.seed),
        "result": target.result,
    }
    start = load.command or generator.start
    return (*fill(start, values), *generator.arguments(load, target), *fill(load.arguments, values))


def check_arguments(load: LoadPlan) -> None:
    """Refuse arguments of a plan that set what a key of it sets: the two could say different things.

    Raises:
        LoadError: with the key to use instead.
    """
    for flag in _flags(load):
        for known, key in generator_of(load).owned.items():
            if _is(flag, known):
                raise LoadError(
                    f"load.arguments has {printable(flag, 60)}, which load.{key} sets",
                    f"take it out and set {key} in [load]",
                )


def fixed_output_tokens(load: LoadPlan) -> int | None:
    """Tokens that all answers of a pass have together; None where that is not known beforehand."""
    if load.generator == "command":
        return None
    known = generator_of(load).length_flags
    changed = any(_is(flag, one) for flag in _flags(load) for one in known)
    return None if changed else load.requests * load.output_tokens


def _flags(load: LoadPlan) -> list[str]:
    """Flags among a plan's arguments, as they are written there."""
    return [argument.partition("=")[0] for argument in load.arguments if argument.startswith("-")]


def _is(flag: str, known: str) -> bool:
    """Whether a flag is a known one: argparse takes its beginning too, and `_` for `-` in vLLM's."""
    flag = flag.replace("_", "-")
    return flag == known or (len(flag) > len("--") and flag.startswith("--") and known.startswith(flag))


def _sglang(load: LoadPlan, target: Target) -> tuple[str, ...]:
    # The native endpoint: its answers say how many tokens the server counted (meta_info). Greedy and
    # without an end is what every release does unasked. A range ratio of 1 is no range at all.
    return (
        *("--backend", "sglang", "--base-url", target.url),
        *("--model", target.model, "--dataset-name", "random-ids"),
        *("--random-input-len", str(load.input_tokens), "--random-output-len", str(load.output_tokens)),
        *("--random-range-ratio", "1.0", "--num-prompts", str(load.requests)),
        *("--max-concurrency", str(load.concurrency), "--seed", str(load.seed)),
        *("--warmup-requests", "1", "--disable-tqdm", "--output-file", target.result),
    )


def _vllm(load: LoadPlan, target: Target) -> tuple[str, ...]:
    # Here a range ratio of 0 is no range: lengths lie between (1 - ratio) and (1 + ratio) times the asked.
    folder, _, name = target.result.rpartition("/")
    return (
        *("--backend", "openai", "--base-url", target.url, "--endpoint", "/v1/completions"),
        *("--model", target.model, "--dataset-name", "random"),
        *("--random-input-len", str(load.input_tokens), "--random-output-len", str(load.output_tokens)),
        *("--random-range-ratio", "0.0", "--random-prefix-len", "0", "--num-prompts", str(load.requests)),
        *("--max-concurrency", str(load.concurrency), "--seed", str(load.seed)),
        *("--temperature", "0", "--ignore-eos", "--disable-tqdm"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "99"),
        *("--save-result", "--result-dir", folder or ".", "--result-filename", name),
    )


def _guidellm(load: LoadPlan, target: Target) -> tuple[str, ...]:
    # JSON, not key=value: a model's path may hold a comma.
    backend = {
        "kind": "openai_http",
        "target": target.url,
        "model": target.model,
        "request_format": "/v1/completions",
        "extras": {"body": {"temperature": 0}},
    }
    return (
        *("--backend", json.dumps(backend)),
        *("--profile", f"kind=concurrent,streams={load.concurrency}"),
        *("--constraint", f"kind=max_requests,count={load.requests}"),
        *("--tokenizer", json.dumps({"kind": "hf_auto", "model": target.model})),
        *(
            "--data",
            f"kind=synthetic_text,prompt_tokens={load.input_tokens},output_tokens={load.output_tokens}",
        ),
        *("--seed", f"kind=static,value={load.seed}"),
        *("--output", json.dumps({"kind": "json", "path": target.result}), "--disable-console"),
    )


def _guidellm_benchmark(load: LoadPlan, target: Target) -> tuple[str, ...]:
    # Flags that 0.3.1 has and later releases keep as aliases.
    lengths = f"prompt_tokens={load.input_tokens},output_tokens={load.output_tokens}"
    return (
        *("--target", target.url, "--backend-type", "openai_http", "--model", target.model),
        *("--processor", target.model, "--data", lengths),
        *("--rate-type", "concurrent", "--rate", str(load.concurrency)),
        *("--max-requests", str(load.requests), "--random-seed", str(load.seed)),
        *("--output-path", target.result, "--disable-progress", "--disable-console-outputs"),
    )


def _none(load: LoadPlan, target: Target) -> tuple[str, ...]:
    del load, target
    return ()


_GUIDELLM = Generator(
    name="guidellm",
    start=("guidellm", "run"),
    arguments=_guidellm,
    read=read_guidellm,
    suffix=".json",
    owned={"--profile": "concurrency", "--seed": "seed"},
    length_flags=frozenset({"--data", "--constraint", "-c", "--config", "--scenario"}),
    install="it is installed with `pip install guidellm`, in an environment of its own (it needs numpy 2);"
    ' load.command names it, as in ["/opt/guidellm/bin/guidellm", "run"], and before release 0.7'
    ' ["/opt/guidellm/bin/guidellm", "benchmark"]',
)
_GUIDELLM_BENCHMARK = replace(
    _GUIDELLM,
    arguments=_guidellm_benchmark,
    owned={
        "--rate": "concurrency",
        "--rate-type": "concurrency",
        "--profile": "concurrency",
        "--random-seed": "seed",
        "--max-requests": "requests",
    },
    length_flags=frozenset({"--data", "--max-seconds", "--scenario"}),
)
_RANDOM_LENGTHS = {
    "--num-prompts": "requests",
    "--max-concurrency": "concurrency",
    "--seed": "seed",
    "--random-input-len": "input_tokens",
    "--random-output-len": "output_tokens",
}

GENERATORS: Mapping[str, Generator] = {
    "sglang.bench_serving": Generator(
        name="sglang.bench_serving",
        start=("python3", "-m", "sglang.bench_serving"),
        arguments=_sglang,
        read=read_sglang,
        suffix=".jsonl",
        owned={**_RANDOM_LENGTHS, "--output-file": "result"},
        length_flags=frozenset(
            [
                *("--dataset-name", "--dataset-path", "--random-range-ratio"),
                *("--disable-ignore-eos", "--extra-request-body"),
            ]
        ),
        install="it comes with SGLang: load.command names the Python of that environment, as in"
        ' ["/opt/sglang/bin/python", "-m", "sglang.bench_serving"]',
    ),
    "vllm bench serve": Generator(
        name="vllm bench serve",
        start=("vllm", "bench", "serve"),
        arguments=_vllm,
        read=read_vllm,
        suffix=".json",
        owned={
            **_RANDOM_LENGTHS,
            "--input-len": "input_tokens",
            "--output-len": "output_tokens",
            "--result-dir": "result",
            "--result-filename": "result",
        },
        length_flags=frozenset(
            [
                "--dataset-name",
                "--dataset-path",
                "--random-range-ratio",
                "--random-prefix-len",
                "--extra-body",
            ]
        ),
        install='it comes with vLLM: load.command names it, as in ["/opt/vllm/bin/vllm", "bench", "serve"]',
    ),
    "guidellm": _GUIDELLM,
    "command": Generator(
        name="command",
        start=(),
        arguments=_none,
        read=read_mapped,
        suffix=".json",
        owned={},
        length_flags=frozenset(),
        install="load.command names what starts it",
    ),
}
"""By the name that plans give."""
