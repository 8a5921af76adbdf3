"""How the users' load generators are started."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.applications.experiments.generators import (
    GENERATORS,
    Target,
    check_arguments,
    command_of,
    fixed_output_tokens,
    generator_of,
    load_of_pass,
)
from moetune.applications.experiments.load_errors import LoadError
from moetune.applications.experiments.plan_fields import GENERATORS as PLAN_NAMES
from moetune.domain.experiment_plan import LoadPlan
from tests.wheels import members, read_member

TARGET = Target("http://127.0.0.1:30001", "/models/made", "/run/pass.json")
LOAD = LoadPlan("", requests=200, concurrency=16, input_tokens=1024, output_tokens=256, seed=7)
KNOWN = ("sglang.bench_serving", "vllm bench serve", "guidellm")


def load_for(generator: str, *arguments: str, command: tuple[str, ...] = ()) -> LoadPlan:
    return replace(LOAD, generator=generator, arguments=arguments, command=command)


def options(generator: str, *arguments: str, command: tuple[str, ...] = ()) -> dict[str, str]:
    """Flags of a command with their values."""
    words = command_of(load_for(generator, *arguments, command=command), TARGET)
    return {
        word: "" if index + 1 == len(words) or words[index + 1].startswith("--") else words[index + 1]
        for index, word in enumerate(words)
        if word.startswith("--")
    }


# --- what every pass fixes


def test_every_generator_that_a_plan_can_name_is_known() -> None:
    assert tuple(GENERATORS) == PLAN_NAMES


def test_sglang_is_told_all_that_fixes_the_work() -> None:
    given_options = options("sglang.bench_serving")

    assert given_options == {
        "--backend": "sglang",
        "--base-url": "http://127.0.0.1:30001",
        "--model": "/models/made",
        "--dataset-name": "random-ids",
        "--random-input-len": "1024",
        "--random-output-len": "256",
        "--random-range-ratio": "1.0",
        "--num-prompts": "200",
        "--max-concurrency": "16",
        "--seed": "7",
        "--warmup-requests": "1",
        "--disable-tqdm": "",
        "--output-file": "/run/pass.json",
    }


def test_vllm_is_told_all_that_fixes_the_work() -> None:
    given_options = options("vllm bench serve")

    assert given_options["--random-range-ratio"] == "0.0"
    assert given_options["--seed"] == "7"
    assert given_options["--temperature"] == "0"
    assert "--ignore-eos" in given_options
    assert (given_options["--random-input-len"], given_options["--random-output-len"]) == ("1024", "256")
    assert (given_options["--num-prompts"], given_options["--max-concurrency"]) == ("200", "16")
    assert (given_options["--result-dir"], given_options["--result-filename"]) == ("/run", "pass.json")


@pytest.mark.parametrize("command", [(), ("/opt/guidellm/bin/guidellm", "run")])
def test_guidellm_is_told_all_that_fixes_the_work(command: tuple[str, ...]) -> None:
    given_options = options("guidellm", command=command)

    assert command_of(load_for("guidellm", command=command), TARGET)[1] == "run"
    assert json.loads(given_options["--backend"]) == {
        "kind": "openai_http",
        "target": "http://127.0.0.1:30001",
        "model": "/models/made",
        "request_format": "/v1/completions",
        "extras": {"body": {"temperature": 0}},
    }
    assert given_options["--profile"] == "kind=concurrent,streams=16"
    assert given_options["--constraint"] == "kind=max_requests,count=200"
    assert given_options["--data"] == "kind=synthetic_text,prompt_tokens=1024,output_tokens=256"
    assert given_options["--seed"] == "kind=static,value=7"
    assert json.loads(given_options["--output"])["path"] == "/run/pass.json"


def test_guidellms_older_form_is_spoken_to_the_older_command() -> None:
    given_options = options("guidellm", command=("guidellm", "benchmark"))

    assert given_options["--target"] == "http://127.0.0.1:30001"
    assert (given_options["--rate-type"], given_options["--rate"]) == ("concurrent", "16")
    assert (given_options["--max-requests"], given_options["--random-seed"]) == ("200", "7")
    assert given_options["--data"] == "prompt_tokens=1024,output_tokens=256"
    assert "--constraint" not in given_options


def test_a_model_path_with_quotes_and_commas_reaches_guidellm_whole() -> None:
    target = replace(TARGET, model='/models/a,"b"=c')

    words = command_of(load_for("guidellm"), target)

    assert json.loads(words[words.index("--backend") + 1])["model"] == '/models/a,"b"=c'
    assert json.loads(words[words.index("--tokenizer") + 1])["model"] == '/models/a,"b"=c'


@pytest.mark.parametrize("generator", KNOWN)
def test_what_the_plan_adds_comes_last(generator: str) -> None:
    words = command_of(load_for(generator, "--backend", "vllm"), TARGET)

    assert words[-2:] == ("--backend", "vllm")


def test_placeholders_of_a_users_command_are_filled() -> None:
    load = load_for(
        "command",
        "--n={requests}/{concurrency}",
        '{"json": {"seed": {seed}}}',
        command=(
            "load",
            "{url}",
            "{host}",
            "{port}",
            "{model}",
            "{input_tokens}",
            "{output_tokens}",
            "{result}",
        ),
    )

    assert command_of(load, TARGET) == (
        *("load", "http://127.0.0.1:30001", "127.0.0.1", "30001", "/models/made", "1024", "256"),
        *("/run/pass.json", "--n=200/16", '{"json": {"seed": 7}}'),
    )


# --- seeds


def test_each_pass_has_its_own_prompts_and_every_start_the_same_ones() -> None:
    seeds = [load_of_pass(LOAD, number).seed for number in range(4)]

    assert len(set(seeds)) == 4
    assert seeds == [load_of_pass(LOAD, number).seed for number in range(4)]
    assert replace(load_of_pass(LOAD, 3), seed=LOAD.seed) == LOAD


@given(st.integers(0, 2**31 - 1), st.integers(0, 100))
def test_a_seed_stays_one_that_generators_take(seed: int, number: int) -> None:
    assert 0 <= load_of_pass(replace(LOAD, seed=seed), number).seed < 2**31


# --- arguments of the plan


@pytest.mark.parametrize(
    ("generator", "flag", "key"),
    [
        ("sglang.bench_serving", "--num-prompts=50", "requests"),
        ("sglang.bench_serving", "--num-prompt", "requests"),
        ("sglang.bench_serving", "--random-output", "output_tokens"),
        ("sglang.bench_serving", "--max-concurrency", "concurrency"),
        ("sglang.bench_serving", "--output-file", "result"),
        ("vllm bench serve", "--seed", "seed"),
        ("vllm bench serve", "--num_prompts", "requests"),
        ("vllm bench serve", "--output-len", "output_tokens"),
        ("guidellm", "--profile", "concurrency"),
    ],
)
def test_an_argument_that_a_key_sets_is_refused_with_the_key(generator: str, flag: str, key: str) -> None:
    with pytest.raises(LoadError, match=rf"load\.{key} sets"):
        check_arguments(load_for(generator, flag, "1"))


def test_guidellms_older_flags_are_refused_in_the_older_form_alone() -> None:
    check_arguments(load_for("guidellm", "--rate", "3"))
    with pytest.raises(LoadError, match="concurrency"):
        check_arguments(load_for("guidellm", "--rate", "3", command=("guidellm", "benchmark")))


@pytest.mark.parametrize(
    ("generator", "arguments", "expected"),
    [
        ("sglang.bench_serving", (), 200 * 256),
        ("sglang.bench_serving", ("--backend", "vllm", "--warmup-requests", "5"), 200 * 256),
        ("sglang.bench_serving", ("--random-range-ratio", "0.5"), None),
        ("sglang.bench_serving", ("--dataset-name=sharegpt",), None),
        ("sglang.bench_serving", ("--random-range", "0.5"), None),
        ("sglang.bench_serving", ("--extra-request-body", "{}"), None),
        ("vllm bench serve", ("--tokenizer", "/t"), 200 * 256),
        ("vllm bench serve", ("--random_range_ratio", "0.5"), None),
        ("guidellm", (), 200 * 256),
        ("guidellm", ("--data", "kind=json_file,path=a.json"), None),
        ("command", (), None),
    ],
)
def test_tokens_are_known_beforehand_unless_arguments_change_what_is_sent(
    generator: str, arguments: tuple[str, ...], expected: int | None
) -> None:
    assert fixed_output_tokens(load_for(generator, *arguments)) == expected


def test_arguments_that_change_nothing_else_are_taken() -> None:
    check_arguments(load_for("sglang.bench_serving", "--backend", "vllm", "--tokenizer", "/t", "-x"))
    check_arguments(load_for("vllm bench serve", "--header", "a=--seed"))
    check_arguments(load_for("command", "--seed", "1"))


@pytest.mark.parametrize("generator", KNOWN)
def test_a_missing_generator_is_told_how_to_get_without_a_host(generator: str) -> None:
    hint = generator_of(load_for(generator)).install

    assert "load.command" in hint
    assert not re.search(r"https?:|\.(org|com|io)\b", hint)


# --- the flags are the generators' own

SGLANG = ["0.5.1", "0.5.4", "0.5.6", "0.5.9", "0.5.12", "0.5.15", "0.5.20", "0.5.23"]
VLLM = ["0.10.2", "0.12.0", "0.20.0", "0.27.1", "0.33.0"]
_FILES = re.compile(
    r"sglang/(bench_serving|benchmark/serving|benchmark/datasets/common)\.py|vllm/benchmarks/(serve|datasets|datasets/datasets)\.py"
)


@cache
def source(package: str, version: str) -> str:
    names = [name for name in members(package, version) if _FILES.fullmatch(name)]
    return "\n".join(read_member(package, version, name) for name in names)


@pytest.mark.parametrize(
    ("package", "version", "generator"),
    [("sglang", version, "sglang.bench_serving") for version in SGLANG]
    + [("vllm", version, "vllm bench serve") for version in VLLM],
)
def test_every_flag_is_known_to_the_published_generator(package: str, version: str, generator: str) -> None:
    known = set(re.findall(r'^\s*(?:\w+\.add_argument\()?"(--[a-z0-9-]+)"', source(package, version), re.M))
    used = set(options(generator))

    assert used <= known, sorted(used - known)


@pytest.mark.parametrize("version", SGLANG)
def test_sglang_has_the_data_set_that_downloads_nothing(version: str) -> None:
    assert '"random-ids"' in source("sglang", version)


@pytest.mark.parametrize("version", SGLANG)
def test_sglangs_native_endpoint_counts_what_the_server_counts(version: str) -> None:
    # The reason for --backend sglang: through /v1/completions the asked length stands for the real one.
    text = source("sglang", version)
    native = text.partition("async def async_request_sglang_generate")[2].partition("\nasync def ")[0]

    assert '["meta_info"]["completion_tokens"]' in native


def test_what_a_range_ratio_is_differs_between_the_two() -> None:
    # vLLM: from (1 - ratio) to (1 + ratio) times the length; sglang: from ratio times the length up to it.
    for version in VLLM:
        assert "[0, 1)" in source("vllm", version)
    for version in SGLANG:
        assert re.search(r"int\((output_len|full_len) \* range_ratio\)", source("sglang", version)), version
