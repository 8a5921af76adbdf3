"""What is known of the servers' flags: true to the published wheels, and asked as a plan asks it."""

from __future__ import annotations

import ast
import json
import re
from importlib import resources
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.experiment import ServerFacts
from moetune.domain.experiment_plan import Intervention
from moetune.domain.version import parse_release, release_text
from moetune.servers.command_facts import command_words, read_command
from moetune.servers.command_options import Option, flag_of, last_values, options_of
from moetune.servers.flag_data import Flag, FlagBook, FlagDataError, flag_book, read_flag_book
from moetune.servers.flags import (
    ProofRule,
    Setting,
    book_of,
    consequences_of,
    flag_problems,
    known_flag,
    proofs_of,
    settings_of,
    spelling_problems,
)
from tests.servers.log_texts_of_wheels import messages
from tests.servers.server_options import document, flags_of
from tests.wheels import members, read_member

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moetune.domain.version import Release

SERVERS = ("sglang", "vllm")
SUM = "--enable-fused-moe-sum-all-reduce"
OFF = "--enforce-disable-flashinfer-allreduce-fusion"
# What the servers print of their own configuration: no message, but the repr of an object.
PRINTED_CONFIG = re.compile(r"['\"](fuse_allreduce_rms|enable_fi_allreduce_fusion)['\"]: ?[TtFf]\w+")
VARIABLE_SOURCES = {
    "sglang": re.compile(
        r"sglang/srt/(environ\.py|server_args\.py|layers/.*\.py|arg_groups/.*\.py|utils/.*\.py)"
    ),
    "vllm": re.compile(r"vllm/(envs|model_executor/layers/batch_invariant)\.py"),
}


def data(server: str, part: str) -> str:
    return (resources.files("moetune.servers") / "data" / f"{server}_{part}.json").read_text("utf-8")


def flags(book: FlagBook) -> Iterator[Flag]:
    yield from {flag.name: flag for flag in book.flags.values()}.values()


def releases(book: FlagBook, flag: Flag) -> list[Release]:
    return [one for one in book.inspected if flag.since <= one <= flag.until]


# --- true to the wheels ------------------------------------------------------------------------------


@pytest.mark.parametrize("server", SERVERS)
def test_every_option_of_every_release_that_was_read_is_the_parsers_own(server: str) -> None:
    """The packaged list is what the argument parsers of the published wheels declare, flag by flag."""
    inspected = json.loads(data(server, "flags"))["inspected"]
    assert data(server, "options") == document(server, inspected)


@pytest.mark.parametrize("server", SERVERS)
def test_a_flag_of_the_table_is_in_the_releases_that_it_says_and_in_no_other(server: str) -> None:
    book = flag_book(server)
    for flag in flags(book):
        if not flag.name.startswith("--") or "." in flag.name:
            continue
        for release in book.inspected:
            declared = flag.name in flags_of(server, release_text(release))
            assert declared == (flag.since <= release <= flag.until), (flag.name, release)
        newest = flags_of(server, release_text(releases(book, flag)[-1]))
        # `--tp` and `--ep` are no flags of the parser but prefixes that it takes.
        for alias in flag.aliases:
            # vLLM takes `-O 2` and `-O2` apart before argparse (`utils/argparse_utils.py`).
            assert alias == "-O" or any(one.startswith(alias) for one in newest), alias


@pytest.mark.parametrize("server", SERVERS)
def test_roles_are_flags_of_the_newest_release(server: str) -> None:
    book = flag_book(server)
    newest = flags_of(server, release_text(book.inspected[-1]))
    for role, names in book.roles.items():
        for name in names:
            fits = {one for one in newest if one == name or (name.startswith("--") and one.startswith(name))}
            assert fits, (role, name)


@pytest.mark.parametrize("server", SERVERS)
def test_a_variable_of_the_table_is_read_in_the_releases_that_it_says(server: str) -> None:
    book = flag_book(server)
    variables = [flag for flag in flags(book) if not flag.name.startswith("-")]
    # Those in between were read too; the ends and their neighbours are where the table can be wrong.
    for release in book.inspected:
        text = "\n".join(
            read_member(server, release_text(release), name)
            for name in members(server, release_text(release))
            if VARIABLE_SOURCES[server].fullmatch(name)
        )
        words = set(re.findall(r"\b(?:SGLANG|VLLM)_[A-Z0-9_]+\b", text))
        # Named only to warn whoever still sets it.
        words -= set(re.findall(r"\"(\w+)\": _DeprecatedEnv\(", text))
        for flag in variables:
            assert (flag.name in words) == (flag.since <= release <= flag.until), (flag.name, release)


@pytest.mark.parametrize("version", ["0.10.2", "0.11.0", "0.11.1", "0.12.0", "0.13.0", "0.20.0", "0.33.0"])
def test_settings_inside_the_compilation_config_are_fields_of_its_passes(version: str) -> None:
    tree = ast.parse(read_member("vllm", version, "vllm/config/compilation.py"))
    passes = next(one for one in ast.walk(tree) if isinstance(one, ast.ClassDef) and one.name == "PassConfig")
    declared = {
        one.target.id
        for one in passes.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }
    book = flag_book("vllm")
    inside = [flag for flag in flags(book) if flag.name.startswith("--compilation-config.pass-config.")]
    assert len(inside) == 2
    for flag in inside:
        field = flag.name.rpartition(".")[2].replace("-", "_")
        assert (field in declared) == (flag.since <= parse_release(version) <= flag.until), field


@pytest.mark.parametrize("server", SERVERS)
def test_texts_of_proofs_are_messages_of_the_releases_that_they_are_for(server: str) -> None:
    """Each refusal stands in the source of each of its releases, and of the proofs at least one does."""
    book = flag_book(server)
    looked_at = 0
    for flag in flags(book):
        for proof in flag.proofs:
            for release in releases(book, flag):
                if not proof.since <= release <= proof.until:
                    continue
                source = messages(server, release_text(release))
                active = [one.replace("{value}", "") for one in proof.active]
                shown = [one for one in active if PRINTED_CONFIG.fullmatch(one) or source.can_print(one)]
                assert shown or proof.argument, (flag.name, release, active)
                for text in proof.refused:
                    looked_at += 1
                    assert source.can_print(text), (flag.name, release, text)
    assert looked_at > 20


def test_a_text_that_no_release_prints_is_seen() -> None:
    source = messages("sglang", "0.5.23")
    assert source.can_print("Capture target prefill CUDA graph begin. backend=breakable")
    assert not source.can_print("Capture target prefill CUDA graph ends. backend=breakable")
    assert not source.can_print("FlashInfer AllReduce Fusion enabled and workspace initialised")


@pytest.mark.parametrize(
    "version", [release_text(one) for one in flag_book("sglang").inspected if one >= (0, 5, 9)]
)
def test_models_with_fusion_by_default_are_the_servers_own_list(version: str) -> None:
    """The architectures for which the table says `already on` are those of that release's source."""
    lists = []
    for name in members("sglang", version):
        if re.fullmatch(r"sglang/srt/(server_args|arg_groups/overrides)\.py", name):
            for node in ast.walk(ast.parse(read_member("sglang", version, name))):
                if isinstance(node, ast.List | ast.Set):
                    words = {str(one.value) for one in node.elts if isinstance(one, ast.Constant)}
                    if {"Glm4MoeLiteForCausalLM", "GptOssForCausalLM", "Qwen3MoeForCausalLM"} <= words:
                        lists.append(words)
    assert len(lists) == 1
    flag = known_flag("sglang", version, "--enable-flashinfer-allreduce-fusion")
    assert flag is not None
    release = parse_release(version)
    rules = [
        rule for rule in flag.rules if rule.since <= release <= rule.until and "by default" in rule.message
    ]
    assert len(rules) == 1
    assert set({c.fact: c.values for c in rules[0].conditions}["arch"] or ()) == lists[0]


# --- the data themselves -----------------------------------------------------------------------------


@pytest.mark.parametrize("server", SERVERS)
def test_consequences_are_facts_or_arguments(server: str) -> None:
    """A misspelled fact would make an arm INVALID that is not."""
    known = {*ServerFacts.__dataclass_fields__}
    arguments = {name.lstrip("-").replace("-", "_") for name in flag_book(server).options}
    # Fields without a flag: nested configs that vLLM prints, one that SGLang derives.
    nested = {
        "compilation_config",
        "kernel_config",
        "lora_config",
        "attention_config",
        "max_num_scheduled_tokens",
    }
    for flag in flags(flag_book(server)):
        assert set(flag.changes) <= known | arguments | nested, flag.name


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda flag: flag.update(since="0.5.22"), "was not read"),
        (lambda flag: flag.update(takes="two"), "takes nothing that is known"),
        (lambda flag: flag.update(surplus=1), "unknown keys"),
        (
            lambda flag: flag["rules"].append({"severity": "bad", "message": "", "hint": "h", "source": "s"}),
            "rule",
        ),
        (lambda flag: flag["proofs"].append({"what": "w"}), "a proof is a text or an argument"),
        (lambda flag: flag.update(name="--ep-size"), "there twice"),
    ],
)
def test_data_that_contradict_themselves_are_refused(change: object, said: str) -> None:
    table, options = json.loads(data("sglang", "flags")), json.loads(data("sglang", "options"))
    change(table["flags"][0])  # type: ignore[operator]
    with pytest.raises(FlagDataError, match=said):
        read_flag_book(table, options)


# --- asked -------------------------------------------------------------------------------------------


def test_a_flag_is_known_from_its_first_release_to_its_last() -> None:
    assert known_flag("sglang", "0.5.9", SUM) is None
    assert known_flag("sglang", "0.5.10", SUM) is not None
    assert known_flag("sglang", "0.5.10.post1", f"{SUM}=true") is not None
    assert known_flag("sglang", "0.5.18", "--disable-piecewise-cuda-graph") is not None
    assert known_flag("sglang", "0.5.23", "--disable-piecewise-cuda-graph") is None
    assert known_flag("sglang", "", "--expert-parallel-size") == known_flag("sglang", "", "--ep-size")
    assert known_flag("vllm", "0.33.0", "VLLM_USE_FLASHINFER_MOE_FP8") is None
    assert known_flag("vllm", "0.20.0", "VLLM_USE_FLASHINFER_MOE_FP8") is not None
    assert known_flag("vllm", "0.33.0", "-O.pass_config.fuse_allreduce_rms=true") is not None
    assert known_flag("other", "1.0", SUM) is None


def test_the_sum_in_the_kernel_has_no_line_and_its_argument_stands_for_it() -> None:
    one = Intervention("sum", arguments=(SUM,))
    rule = ProofRule((), (), ("enable_fused_moe_sum_all_reduce", "True"), "the sum inside the MoE kernel")
    assert proofs_of("sglang", "0.5.23", one) == (rule,)
    assert consequences_of("sglang", "0.5.23", one) == {"enable_fused_moe_sum_all_reduce"}


@pytest.mark.parametrize(
    ("version", "text"),
    [
        ("0.5.9", "FlashInfer workspace initialized for rank"),
        ("0.5.12", "FlashInfer workspace initialized for rank"),
        ("0.5.15", "FlashInfer AllReduce Fusion enabled and workspace initialized"),
        ("0.5.23", "FlashInfer AllReduce Fusion enabled and workspace initialized"),
    ],
)
def test_a_fused_all_reduce_is_proven_by_the_line_of_its_release(version: str, text: str) -> None:
    (rule,) = proofs_of(
        "sglang", version, Intervention("f", arguments=("--enable-flashinfer-allreduce-fusion",))
    )
    assert rule.active == (text,)
    assert rule.refused
    assert rule.argument is None


def test_the_old_flag_changes_the_new_argument() -> None:
    """From 0.5.14 the old flag resolves to the new one's argument: that is no difference of its own."""
    one = Intervention("f", arguments=("--enable-flashinfer-allreduce-fusion",))
    assert {"all_reduce_fusion", "flashinfer_allreduce_fusion_backend"} <= consequences_of(
        "sglang", "0.5.23", one
    )


def test_values_are_compared_as_the_server_prints_them() -> None:
    given = {
        ("--mem-fraction-static", "0.80"): ("mem_fraction_static", "0.8"),
        ("--chunked-prefill-size=8192",): ("chunked_prefill_size", "8192"),
        ("--cuda-graph-bs", "1", "2", "4"): ("cuda_graph_bs", "[1, 2, 4]"),
        ("--disable_custom_all_reduce",): ("disable_custom_all_reduce", "True"),
        ("--moe-runner-backend", "flashinfer_trtllm"): ("moe_runner_backend", "flashinfer_trtllm"),
    }
    for arguments, argument in given.items():
        (rule,) = proofs_of("sglang", "0.5.12", Intervention("x", arguments=arguments))
        assert rule.argument == argument
    (rule,) = proofs_of("vllm", "0.33.0", Intervention("x", arguments=("--max-num-batched-tokens", "8K")))
    assert rule.argument == ("max_num_batched_tokens", "8192")
    (rule,) = proofs_of("vllm", "0.33.0", Intervention("x", arguments=("--no-enable-prefix-caching",)))
    assert rule.argument == ("enable_prefix_caching", "False")


def test_a_switch_that_was_taken_out_has_to_be_off() -> None:
    one = Intervention("fusion", remove=(OFF,))
    (rule,) = proofs_of("sglang", "0.5.23", one)
    assert rule.argument == ("enforce_disable_flashinfer_allreduce_fusion", "False")
    assert {"all_reduce_fusion", "flashinfer_allreduce_fusion_backend"} <= consequences_of(
        "sglang", "0.5.23", one
    )


def test_a_moe_runner_is_proven_by_what_its_server_prints() -> None:
    (rule,) = proofs_of("sglang", "0.5.23", Intervention("t", arguments=("--moe-runner-backend", "triton")))
    assert "Using MoE kernel config from" in rule.active
    (rule,) = proofs_of("vllm", "0.33.0", Intervention("t", arguments=("--moe-backend", "triton")))
    assert "Using TRITON Fp8 MoE backend" in rule.active
    assert "Using 'TRITON' WNA16 MoE backend" in rule.active
    (rule,) = proofs_of("vllm", "0.33.0", Intervention("t", arguments=("--moe-backend", "hpc")))
    assert rule.argument == ("moe_backend", "hpc")
    assert {"runner", "configs"} <= consequences_of(
        "vllm", "0.33.0", Intervention("t", arguments=("--moe-backend=triton",))
    )


def test_a_directory_variable_is_proven_by_the_path_that_is_read() -> None:
    one = Intervention("mine", environment={"SGLANG_MOE_CONFIG_DIR": "/srv/tuned", "UNKNOWN": "1"})
    (rule,) = proofs_of("sglang", "0.5.23", one)
    assert rule.active == ("Using MoE kernel config from /srv/tuned",)
    assert "configs" in consequences_of("sglang", "0.5.23", one)
    taken_out = Intervention("none", environment={"SGLANG_MOE_CONFIG_DIR": ""})
    assert proofs_of("sglang", "0.5.23", taken_out) == ()


def test_json_and_dots_say_the_same() -> None:
    ways = (
        ("--compilation-config", '{"pass_config": {"fuse_allreduce_rms": true}}'),
        ("--compilation_config.pass_config.fuse_allreduce_rms=true",),
        ("-cc.pass_config.fuse_allreduce_rms", "true"),
        ("-O.pass_config.fuse_allreduce_rms=true",),
    )
    for way in ways:
        (rule,) = proofs_of("vllm", "0.33.0", Intervention("f", arguments=way))
        assert "'fuse_allreduce_rms': True" in rule.active, way
        assert any("not supported for world size" in text or "is not" in text for text in rule.refused)
    (rule,) = proofs_of("vllm", "0.33.0", Intervention("f", arguments=(ways[1][0].replace("true", "false"),)))
    assert "'fuse_allreduce_rms': False" in rule.active


def test_what_is_not_in_the_table_has_no_rule() -> None:
    """Then only what changes among the facts can show it."""
    one = Intervention(
        "x", arguments=("--some-flag", "1"), environment={"FOO": "1"}, may_change=("kv_tokens",)
    )
    for server in (*SERVERS, "other"):
        assert proofs_of(server, "0.5.23", one) == ()
        assert consequences_of(server, "0.5.23", one) == {"kv_tokens"}
    configs = Intervention("c", configs=("/x",))
    assert consequences_of("other", "", configs) == {"configs"}


# --- problems ----------------------------------------------------------------------------------------

SM_120 = {"gpu": "NVIDIA RTX PRO 6000", "cc": 120, "vendor": "nvidia", "tp": 4, "ep": 1, "nnodes": 1}
QWEN = "Qwen3_5MoeForConditionalGeneration"


def problems(server: str, version: str, command: str, own: str, **facts: object) -> dict[str, str]:
    book = flag_book(server)
    read = read_command(server, f"{command} {own}".split(), {})
    known = {**command_words(book, read), **facts}
    settings = settings_of(server, own.split(), version)
    return {one.severity: one.message for one in reversed(flag_problems(server, version, settings, known))}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("version", "flag", "said"),
    [
        ("0.5.9", "--enable-flashinfer-allreduce-fusion", "nothing is fused"),
        ("0.5.12", "--enable-flashinfer-allreduce-fusion", "nothing is fused"),
        ("0.5.14", "--flashinfer-allreduce-fusion-backend auto", "ends at start"),
        ("0.5.23", "--flashinfer-allreduce-fusion-backend auto", "ends at start"),
    ],
)
def test_a_fused_all_reduce_is_refused_on_sm_120_before_anything_starts(
    version: str, flag: str, said: str
) -> None:
    found = problems("sglang", version, "sglang", flag, arch=QWEN, **SM_120)
    assert said in found["error"]
    assert "sm_120" in found["error"]


@pytest.mark.parametrize(
    ("version", "arch", "on"),
    [
        ("0.5.9", QWEN, False),
        ("0.5.10", QWEN, True),
        ("0.5.12", "MistralLarge3ForCausalLM", False),
        ("0.5.13", "MistralLarge3ForCausalLM", True),
        ("0.5.23", "NemotronH_Omni_Reasoning_V3", True),
    ],
)
def test_what_is_on_by_default_changes_nothing(version: str, arch: str, on: bool) -> None:
    flag = "--enable-flashinfer-allreduce-fusion"
    h200 = {"gpu": "NVIDIA H200", "cc": 90, "h20": False, "vendor": "nvidia", "tp": 4, "ep": 1, "nnodes": 1}
    found = problems("sglang", version, "sglang", flag, arch=arch, a2a="none", **h200)
    assert ("on by default" in found.get("error", "")) == on
    opposite = problems("sglang", version, "sglang", OFF, arch=arch, a2a="none", **h200)
    if version != "0.5.9":
        assert ("not on by default" in opposite.get("error", "")) != on


def test_the_opposite_flag_in_the_baseline_makes_the_arm_a_real_one() -> None:
    h200 = {
        "gpu": "NVIDIA H200",
        "cc": 90,
        "h20": False,
        "arch": QWEN,
        "a2a": "none",
        "tp": 4,
        "ep": 1,
        "nnodes": 1,
    }
    still = problems(
        "sglang", "0.5.23", f"sglang {OFF}", "--flashinfer-allreduce-fusion-backend auto", **h200
    )
    assert "wins over it" in still["error"]
    assert "error" not in problems(
        "sglang", "0.5.23", "sglang", "--flashinfer-allreduce-fusion-backend trtllm", **h200
    )


def test_the_sum_in_the_kernel_writes_outside_its_output_with_expert_parallelism() -> None:
    for version, unsafe in (("0.5.10", True), ("0.5.20", True), ("0.5.23", False)):
        found = problems("sglang", version, "sglang", SUM, **{**SM_120, "ep": 4}, topk=8, reads="yes")
        assert ("outside its output" in found.get("error", "")) == unsafe, version


def test_the_sum_in_the_kernel_needs_three_experts_and_the_triton_kernel() -> None:
    assert (
        "more than 2 experts"
        in problems("sglang", "0.5.23", "s", SUM, **SM_120, topk=2, reads="yes")["error"]
    )
    assert "error" not in problems("sglang", "0.5.23", "s", SUM, **SM_120, topk=8, reads="yes")
    found = problems("sglang", "0.5.23", "s", SUM, **SM_120, topk=8, reads="no", runner="marlin")
    assert "marlin is the MoE runner" in found["error"]
    assert "0.5.10 is the first" in problems("sglang", "0.5.9", "s", SUM, **SM_120)["error"]


def test_nothing_is_said_where_a_fact_is_not_known() -> None:
    assert problems("sglang", "0.5.23", "s", SUM) == {}
    assert problems("vllm", "0.33.0", "v", "--moe-backend triton") == {}


def test_vllms_fused_all_reduce_by_gpu_and_ranks() -> None:
    flag = "--compilation-config.pass_config.fuse_allreduce_rms=true"
    h100 = {"gpu": "NVIDIA H100 80GB HBM3", "cc": 90, "dp": 1, "pp": 1}
    assert "error" not in problems("vllm", "0.13.0", "v", flag, tp=4, **h100)
    assert "not for 3" in problems("vllm", "0.13.0", "v", flag, tp=3, **h100)["error"]
    assert "on by default" in problems("vllm", "0.33.0", "v", flag, tp=4, **h100)["error"]
    for level in ("-O 1", "-O1", "--optimization-level=1"):
        assert "error" not in problems("vllm", "0.33.0", f"v {level}", flag, tp=4, **h100)
    assert "it is refused" in problems("vllm", "0.33.0", "v", flag, **SM_120)["error"]
    assert "error" not in problems("vllm", "0.33.0", "v", flag.replace("true", "false"), **SM_120)


def test_a_misspelled_flag_is_found_with_the_nearest() -> None:
    (found,) = spelling_problems("sglang", "0.5.23", ["--enable-fused-moe-sum-allreduce", "--tp", "4"])
    assert found.severity == "error"
    assert SUM in found.hint
    (old,) = spelling_problems("sglang", "0.5.23", ["--cuda-graph-tc-compiler", "eager"])
    assert "0.5.14 to 0.5.20" in old.message
    assert spelling_problems("sglang", "0.5.23", ["--tensor-parallel", "4"]) == ()  # argparse takes prefixes
    (new,) = spelling_problems("vllm", "0.33.0", ["--enable-exert-parallel"])
    assert new.severity == "warning"
    assert "--enable-expert-parallel" in new.hint
    assert spelling_problems("vllm", "0.33.0", ["--no-enable-dbo", "-tp", "4", "-O.level=3"]) == ()
    assert spelling_problems("other", "", ["--nonsense"]) == ()


def test_between_two_releases_that_disagree_the_server_is_asked() -> None:
    """0.5.7 and 0.5.8 were not read: 0.5.6 lacks the flag, 0.5.9 has it."""
    assert spelling_problems("sglang", "0.5.8", ["--enable-lora-overlap-loading"]) == ()
    assert spelling_problems("sglang", "0.5.6", ["--enable-lora-overlap-loading"]) != ()


def test_a_deprecated_flag_is_a_warning_with_what_stands_for_it() -> None:
    found = problems("sglang", "0.5.18", "s", "--disable-piecewise-cuda-graph")
    assert "deprecated from 0.5.14" in found["warning"]
    gone = problems("sglang", "0.5.23", "s", "--disable-piecewise-cuda-graph")
    assert "not have it any more" in gone["error"]


# --- commands ----------------------------------------------------------------------------------------


def test_a_command_of_sglang_is_read() -> None:
    command = (
        "python -m sglang.launch_server --model-path org/model --tp=8 --ep-size 8 --port 31000 "
        "--host 0.0.0.0 --moe-runner-backend triton --enable-deterministic-inference "
        "--chunked_prefill_size 4096 --enable-fused-moe-sum-all-reduce"
    )
    facts = read_command("sglang", command.split(), {"SGLANG_USE_AITER": "1", "GONE": ""}, "0.5.23")
    assert facts.model == "org/model"
    assert (facts.parallelism.tp, facts.parallelism.ep) == (8, 8)
    assert (facts.port, facts.host, facts.prefill_chunk) == (31000, "0.0.0.0", 4096)
    assert facts.options.moe_runner_backend == "triton"
    assert facts.options.deterministic
    assert facts.options.fused_moe_sum
    assert facts.options.environment == {"SGLANG_USE_AITER": "1"}


def test_a_command_of_vllm_is_read() -> None:
    command = "docker run --gpus all image serve org/model -tp 4 -dp 2 -ep --moe-backend triton --port {port}"
    facts = read_command("vllm", command.split(), {"VLLM_BATCH_INVARIANT": "1"}, "0.33.0")
    assert facts.model == "org/model"
    assert (facts.parallelism.tp, facts.parallelism.ep, facts.parallelism.dp) == (4, 2, 2)
    assert facts.port == 0
    assert facts.options.deterministic
    assert read_command("vllm", ["x", "--model", "a/b"], {}).model == "a/b"
    assert read_command("other", command.split(), {}).model == ""


def test_an_all_to_all_backend_spreads_the_experts() -> None:
    facts = read_command("sglang", ["s", "--tp", "8", "--moe-a2a-backend", "deepep"], {})
    assert facts.parallelism.ep == 8


def test_options_are_read_as_a_person_reads_them() -> None:
    found = options_of(["run", "it", "--a_b=1", "--c", "-1", "{x}", "-tp", "4", "--d"])
    assert found == (
        Option("", ("run", "it")),
        Option("--a-b", ("1",)),
        Option("--c", ("-1", "{x}")),
        Option("-tp", ("4",)),
        Option("--d", ()),
    )
    assert last_values(["--a", "1", "--a=2"]) == {"--a": ("2",)}
    assert flag_of("-1") == flag_of("{--a}") == flag_of("") == ""


@given(st.lists(st.text(max_size=12), max_size=12), st.sampled_from((*SERVERS, "other")), st.text(max_size=8))
def test_any_arguments_are_read_without_a_fault(arguments: list[str], server: str, version: str) -> None:
    one = Intervention("x", arguments=tuple(arguments), environment={"SGLANG_MOE_CONFIG_DIR": "x"})
    assert isinstance(consequences_of(server, version, one), frozenset)
    assert isinstance(proofs_of(server, version, one), tuple)
    read_command(server, arguments, {}, version)
    settings = settings_of(server, arguments, version)
    assert all(isinstance(item, Setting) for item in settings)
    book = book_of(server)
    facts = {} if book is None else command_words(book, read_command(server, arguments, {}, version))
    flag_problems(server, version, settings, facts)
    spelling_problems(server, version, arguments)


@given(st.lists(st.sampled_from(["--a", "--b=1", "c", "-d", "--a_e", "--a-e"]), max_size=8))
def test_options_lose_no_word(arguments: list[str]) -> None:
    words = sum(len(one.values) + (1 if one.flag else 0) for one in options_of(arguments))
    assert words == len(arguments) + sum("=" in word for word in arguments)
