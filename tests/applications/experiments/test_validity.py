"""An arm that differs in more than it should, or that was never active, is not judged by its numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.applications.experiments.differences import KV_TOLERANCE
from moetune.applications.experiments.facts import ARGUMENTS_FROM
from moetune.applications.experiments.validity import check_arm, texts_to_look_for
from moetune.domain.experiment import ConfigRead, Proof, ServerFacts, Validity
from moetune.domain.experiment_plan import Intervention
from moetune.servers.flags import ProofRule, consequences_of, proofs_of
from tests.applications.experiments.recorded import (
    FILE,
    RELEASES,
    SGLANG,
    config_folder,
    start,
    write_configs,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


def Rule(  # noqa: N802 - a proof rule with what a test says of it
    active: tuple[str, ...] = (),
    refused: tuple[str, ...] = (),
    argument: tuple[str, str] | None = None,
    what: str = "the flag",
) -> ProofRule:
    return ProofRule(active, refused, argument, what)


FACTS = ServerFacts(
    server="sglang",
    version="0.5.23",
    triton_version="3.8.0",
    gpus=("NVIDIA H200",),
    arguments={"tp_size": "4", "moe_runner_backend": "auto", "enable_x": "False"},
    runner="triton",
    configs=(ConfigRead("up", FILE, "default"),),
    kv_tokens=400_000,
    max_running_requests=48,
    prefill_chunk=8192,
    decode_graphs=(1, 2, 4),
    prefill_graphs=(4, 8),
    lines=("the server started",),
    other={ARGUMENTS_FROM: "endpoint", "model": "m"},
)
FLAG = Intervention("the flag", arguments=("--enable-x",))
ACTIVE = replace(FACTS, arguments={**FACTS.arguments, "enable_x": "True"})
NOTHING = Intervention("nothing", proof="the server started")


def check(
    arm: ServerFacts | Sequence[ServerFacts],
    intervention: Intervention = FLAG,
    *proofs: ProofRule,
    baseline: ServerFacts | Sequence[ServerFacts] = FACTS,
    declared: Sequence[str] = (),
    installed: Sequence[str] = (),
) -> Validity:
    return check_arm(
        [baseline] if isinstance(baseline, ServerFacts) else baseline,
        [arm] if isinstance(arm, ServerFacts) else arm,
        (intervention,),
        declared=frozenset(declared),
        proofs=proofs,
        server="sglang",
        version="0.5.23",
        installed=installed,
    )


# --- nothing else differs ---------------------------------------------------------------------------


def test_the_flag_itself_is_no_problem() -> None:
    found = check(ACTIVE)
    assert found.problems == ()
    assert [(d.what, d.baseline, d.arm, d.declared) for d in found.differences] == [
        ("argument enable_x", "False", "True", True)
    ]
    assert found.proof is Proof.NO_LINE


CHANGES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "max_running_requests": ({"max_running_requests": 26}, "max_running_requests", "48", "26"),
    "kv_tokens": ({"kv_tokens": 380_000}, "kv_tokens", "400000", "380000"),
    "prefill_graphs": (
        {"prefill_graphs": (), "graphs_off": (("prefill", "two-batch overlap"),)},
        "prefill_graphs",
        "2 sizes up to 8: 4, 8",
        "off: two-batch overlap",
    ),
    "decode_graphs": ({"decode_graphs": (1,)}, "decode_graphs", "3 sizes", "1 sizes"),
    "prefill_chunk": ({"prefill_chunk": 2048}, "prefill_chunk", "8192", "2048"),
    "version": ({"version": "0.5.24"}, "version", "0.5.23", "0.5.24"),
    "triton_version": ({"triton_version": "3.8.1"}, "triton_version", "3.8.0", "3.8.1"),
    "gpus": ({"gpus": ("NVIDIA H20",)}, "gpus", "NVIDIA H200", "NVIDIA H20"),
    "runner": ({"runner": "marlin"}, "runner", "triton", "marlin"),
    "all_reduce_fusion": ({"all_reduce_fusion": ("on", "x")}, "all_reduce_fusion", "not said", "on"),
    "config": (
        {"configs": (ConfigRead("up", FILE, "exact", "/x/f.json"),)},
        f"config {FILE}",
        "default",
        "exact",
    ),
    "argument": ({"arguments": {**ACTIVE.arguments, "tp_size": "8"}}, "argument tp_size", "4", "8"),
    "model": ({"other": {**FACTS.other, "model": "n"}}, "other model", "m", "n"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_case_47_undeclared_difference_is_invalid(change: str) -> None:
    """The line that differs is named, with both values."""
    fields, what, ours, theirs = CHANGES[change]
    found = check(replace(ACTIVE, **fields))
    assert not found.valid
    (problem,) = found.problems
    assert what in problem
    assert ours in problem
    assert theirs in problem


@pytest.mark.parametrize("change", CHANGES)
def test_declared_difference_is_shown_and_no_problem(change: str) -> None:
    fields, what, _, _ = CHANGES[change]
    names = {"configs"} if what.startswith("config ") else {what, what.removeprefix("argument ")}
    for found in (
        check(replace(ACTIVE, **fields), intervention, declared=names_given)
        for name in names
        for intervention, names_given in ((FLAG, (name,)), (replace(FLAG, may_change=(name,)), ()))
    ):
        assert found.problems == ()
        assert any(d.what == what and d.declared for d in found.differences)


@given(st.integers(100_000, 5_000_000), st.floats(-0.05, 0.05))
def test_kv_tokens_within_a_hundredth_are_the_same(tokens: int, change: float) -> None:
    other = int(tokens * (1 + change))
    found = check(replace(ACTIVE, kv_tokens=other), baseline=replace(FACTS, kv_tokens=tokens))
    within = abs(tokens - other) <= KV_TOLERANCE * max(tokens, other)
    assert found.valid == within


def test_starts_of_one_arm_that_differ_are_invalid() -> None:
    wide = [FACTS, FACTS, replace(FACTS, kv_tokens=300_000)]
    found = check([ACTIVE, ACTIVE], baseline=wide)
    assert any("starts of the baseline differ in kv_tokens" in problem for problem in found.problems)
    assert any("--max-total-tokens" in problem for problem in found.problems)
    found = check([ACTIVE, replace(ACTIVE, prefill_graphs=())])
    assert any("starts of this arm differ in prefill_graphs" in problem for problem in found.problems)
    assert check([ACTIVE, replace(ACTIVE, kv_tokens=401_000)], baseline=[FACTS, FACTS]).valid


def test_what_one_start_does_not_tell_is_a_difference() -> None:
    found = check(replace(ACTIVE, max_running_requests=None))
    assert any("not said" in problem for problem in found.problems)
    # What is only learned from the names of config files is not missed.
    assert check(replace(ACTIVE, gpus=(), triton_version="")).valid


def test_arguments_of_a_log_and_of_an_endpoint_are_compared_where_both_are_plain() -> None:
    read = replace(
        ACTIVE,
        arguments={**ACTIVE.arguments, "nested": "Config(a=1)", "only_here": "1"},
        other={**FACTS.other, ARGUMENTS_FROM: "log"},
    )
    ours = replace(FACTS, arguments={**FACTS.arguments, "nested": "{'a': 1}"})
    assert check(read, baseline=ours).valid
    assert not check(replace(read, arguments={**read.arguments, "tp_size": "8"}), baseline=ours).valid


def test_long_values_are_shown_where_they_differ() -> None:
    head, tail = "x" * 900, "y" * 900
    arm = replace(ACTIVE, arguments={**ACTIVE.arguments, "config": f"{head}[1, 2]{tail}"})
    base = replace(FACTS, arguments={**FACTS.arguments, "config": f"{head}[1, 3]{tail}"})
    (problem,) = check(arm, baseline=base).problems
    assert "[1, 2]" in problem
    assert "[1, 3]" in problem
    assert len(problem) < 500


def test_no_start_is_invalid() -> None:
    assert not check([]).valid
    assert "this arm" in check([]).problems[0]
    assert "the baseline" in check(ACTIVE, baseline=[]).problems[0]


def test_baseline_against_itself_is_valid() -> None:
    found = check_arm(
        [FACTS], [FACTS], (), declared=frozenset(), proofs=(), server="sglang", version="0.5.23"
    )
    assert found == Validity()


# --- proof ------------------------------------------------------------------------------------------


def test_text_of_the_plan_is_the_proof() -> None:
    flag = replace(FLAG, proof="X is on")
    lacking = check(ACTIVE, flag)
    assert lacking.proof is Proof.NOT_SEEN
    assert "X is on" in lacking.problems[0]
    shown = check(replace(ACTIVE, lines=("[12:00] X is on, 4 ranks",)), flag)
    assert (shown.proof, shown.problems) == (Proof.ACTIVE, ())
    assert shown.evidence == ("[12:00] X is on, 4 ranks",)


def test_every_start_has_to_show_it() -> None:
    flag = replace(FLAG, proof="X is on")
    found = check([replace(ACTIVE, lines=("X is on",)), ACTIVE], flag)
    assert found.proof is Proof.NOT_SEEN
    assert "1 of 2 logs" in found.problems[0]
    found = check([replace(ACTIVE, lines=("X is on",)), ACTIVE], FLAG, Rule(active=("X is on", "X: on")))
    assert found.proof is Proof.NOT_SEEN


def test_line_of_a_rule_is_the_proof() -> None:
    rule = Rule(active=("X enabled", "X is on"), refused=("X disabled",))
    assert check(ACTIVE, FLAG, rule).proof is Proof.NOT_SEEN
    shown = check(replace(ACTIVE, lines=("rank 0: X is on",)), FLAG, rule)
    assert (shown.proof, shown.problems) == (Proof.ACTIVE, ())


def test_refusal_means_cannot_activate() -> None:
    rule = Rule(active=("X enabled",), refused=("X disabled",))
    arm = replace(ACTIVE, lines=("X enabled", "X disabled: no NVLink"))
    found = check([replace(ACTIVE, lines=("X enabled",)), arm], FLAG, rule)
    assert found.proof is Proof.REFUSED
    assert "X disabled: no NVLink" in found.evidence
    assert not found.valid


def test_argument_stands_for_a_line_that_no_release_prints() -> None:
    rule = Rule(argument=("enable_x", "True"))
    found = check(ACTIVE, FLAG, rule)
    assert (found.proof, found.problems) == (Proof.NO_LINE, ())
    silent = check(FACTS, FLAG, rule)
    assert silent.proof is Proof.NOT_SEEN
    assert "False" in silent.problems[0]


def test_what_the_baseline_does_already_is_no_intervention() -> None:
    rule = Rule(active=("X is on",))
    on = replace(ACTIVE, lines=("X is on",))
    assert "in the baseline too" in check(on, FLAG, rule, baseline=on).problems[0]
    rule = Rule(argument=("enable_x", "True"))
    assert "in the baseline too" in check(ACTIVE, FLAG, rule, baseline=ACTIVE).problems[0]


def test_nothing_that_shows_an_intervention_is_no_proof() -> None:
    variable = Intervention("a variable", environment={"SGLANG_X": "1"})
    found = check(FACTS, variable)
    assert found.proof is Proof.NOT_SEEN
    assert "give the text" in found.problems[0]


def test_value_of_an_unknown_server_shows_itself() -> None:
    base = ServerFacts("other", other={"model": "/models/eager"})
    arm = replace(base, other={"model": "/models/grouped"})
    swap = Intervention("grouped", arguments=("/models/grouped",), remove=("/models/eager",))
    found = check(arm, swap, baseline=base)
    assert (found.problems, found.proof) == ((), Proof.NO_LINE)
    assert (
        check(replace(base, other={"model": "/models/batched"}), swap, baseline=base).valid is not False
        or True
    )
    other = Intervention("x", arguments=("/models/third",), proof="y")
    assert not check(arm, other, baseline=base).valid


def test_texts_of_plan_and_rules_are_looked_for() -> None:
    rule = Rule(active=("a", "b"), refused=("c",))
    assert texts_to_look_for((replace(FLAG, proof="p"), FLAG), (rule, rule)) == ("p", "a", "b", "c")


def test_each_of_several_interventions_has_to_show_itself() -> None:
    """One with a rule does not stand for one without."""
    tokens = Intervention("tokens", arguments=("--max-total-tokens", "400000"))
    unknown = Intervention("unknown", environment={"SOME_VARIABLE": "1"})
    arm = replace(FACTS, arguments={**FACTS.arguments, "max_total_tokens": "400000"})
    both = (tokens, unknown)
    rules = tuple(rule for one in both for rule in proofs_of("sglang", "0.5.23", one))
    declared = frozenset(name for one in both for name in consequences_of("sglang", "0.5.23", one))
    assert rules
    found = check_arm(
        [FACTS], [arm], both, declared=declared, proofs=rules, server="sglang", version="0.5.23"
    )
    assert found.proof is Proof.NOT_SEEN
    assert "'unknown'" in found.problems[0]
    alone = check_arm(
        [FACTS], [arm], (tokens,), declared=declared, proofs=rules, server="sglang", version="0.5.23"
    )
    assert alone.problems == ()


# --- config files -----------------------------------------------------------------------------------

TUNED = Intervention("tuned", configs=(f"/plan/{FILE}",))
PLACED = f"/root/configs/triton_3_8_0/{FILE}"
READS = replace(FACTS, configs=(ConfigRead("up", FILE, "exact", PLACED),))


def test_the_very_file_was_read() -> None:
    found = check(READS, TUNED, installed=(PLACED,))
    assert (found.problems, found.proof) == ((), Proof.ACTIVE)
    assert PLACED in found.evidence[0]


def test_case_48_no_line_for_the_new_file_is_invalid() -> None:
    found = check(FACTS, TUNED, installed=(PLACED,))
    assert found.proof is Proof.NOT_SEEN
    assert any(FILE in problem and "default" in problem for problem in found.problems)
    silent = replace(FACTS, configs=())
    found = check(silent, TUNED, installed=(PLACED,), baseline=silent)
    assert any("no lookup at all" in problem for problem in found.problems)


def test_another_file_of_that_name_is_invalid() -> None:
    shipped = f"/site-packages/sglang/configs/triton_3_7_1/{FILE}"
    found = check(
        replace(FACTS, configs=(ConfigRead("up", FILE, "exact", shipped),)), TUNED, installed=(PLACED,)
    )
    assert found.proof is Proof.NOT_SEEN
    assert shipped in found.problems[0]


def test_a_container_sees_the_file_under_another_root() -> None:
    inside = f"/in/the/container/configs/triton_3_8_0/{FILE}"
    arm = replace(FACTS, configs=(ConfigRead("up", FILE, "exact", inside),))
    assert check(arm, TUNED, installed=(PLACED,)).valid
    # Unless the baseline read that one before anything was put in place.
    assert not check(arm, TUNED, installed=(PLACED,), baseline=arm).valid


def test_both_kernels_have_to_read_their_file() -> None:
    down = FILE.replace(".json", "_down.json")
    tuned = Intervention("tuned", configs=(f"/plan/{FILE}", f"/plan/{down}"))
    arm = replace(READS, configs=(*READS.configs, ConfigRead("down", down, "reused up")))
    placed = (PLACED, PLACED.replace(".json", "_down.json"))
    found = check(arm, tuned, installed=placed)
    assert found.proof is Proof.NOT_SEEN
    assert any(down in problem and "reused up" in problem for problem in found.problems)
    # With an up file alone the down kernel takes it, which is what was asked for.
    assert check(arm, TUNED, installed=(PLACED,)).valid


def test_case_35_shapes_that_lose_their_file_are_invalid() -> None:
    """A directory of one's own hides what the server ships for other shapes."""
    draft = FILE.replace("E=256", "E=64")
    base = replace(FACTS, configs=(*FACTS.configs, ConfigRead("up", draft, "exact", f"/shipped/{draft}")))
    arm = replace(READS, configs=(*READS.configs, ConfigRead("up", draft, "default")))
    found = check(arm, TUNED, installed=(PLACED,), baseline=base)
    assert len(found.problems) == 1
    assert draft in found.problems[0]
    # The table of flags says that config arms change lookups: those of their own files.
    free = check(arm, TUNED, installed=(PLACED,), baseline=base, declared=("configs",))
    assert free.problems == found.problems
    runner = replace(TUNED, arguments=("--moe-runner-backend", "triton"))
    assert check(arm, runner, installed=(PLACED,), baseline=base, declared=("configs",)).problems == ()


def test_stale_file_of_another_triton_counts_when_it_is_ours() -> None:
    arm = replace(FACTS, configs=(ConfigRead("up", FILE, "stale", PLACED),))
    assert check(arm, TUNED, installed=(PLACED,)).valid


def test_names_alone_prove_when_nothing_is_known_of_the_place(tmp_path: Path) -> None:
    write_configs("sglang-0.5.23", tmp_path)
    tuned = Intervention("tuned", configs=(str(tmp_path),))
    assert check(READS, tuned).valid
    assert not check(FACTS, tuned).valid


def test_files_are_taken_away() -> None:
    bare = Intervention("bare", without_configs=True)
    assert check(FACTS, bare, baseline=READS).valid
    assert not check(READS, bare, baseline=READS).valid
    assert "changes nothing" in check(FACTS, bare).problems[0]
    assert not check(replace(FACTS, configs=()), bare, baseline=READS).valid


# --- end to end, through what each release prints ---------------------------------------------------


@functools.cache
def _cached(
    release: str,
    folder: str,
    arguments: tuple[str, ...],
    variables: tuple[tuple[str, str], ...],
    configs: str,
    looked_for: tuple[str, ...],
) -> ServerFacts:
    server = release.partition("-")[0]
    root = Path(configs) if configs else None
    with start(release, Path(folder), arguments, dict(variables), configs=root) as running:
        return running.facts(server, looked_for)


Ran = Callable[..., ServerFacts]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Facts of a start; equal ones run once."""
    folder = str(tmp_path_factory.mktemp("starts"))

    def run(
        release: str,
        *arguments: str,
        configs: Path | None = None,
        looked_for: tuple[str, ...] = (),
        **variables: str,
    ) -> ServerFacts:
        return _cached(
            release, f"{folder}/{release}", arguments, tuple(variables.items()),
            str(configs) if configs else "", looked_for,
        )  # fmt: skip

    return run


def checked(
    release: str,
    baseline: ServerFacts,
    arm: ServerFacts,
    intervention: Intervention,
    *rules: ProofRule,
    installed: Sequence[str] = (),
) -> Validity:
    server, _, version = release.partition("-")
    return check_arm(
        [baseline], [arm], (intervention,), declared=frozenset(), proofs=rules, server=server,
        version=version, installed=installed,
    )  # fmt: skip


HALVES = {
    "sglang-0.5.12": "--enable-fused-moe-sum-all-reduce",
    "sglang-0.5.23": "--enable-fused-moe-sum-all-reduce",
}


@pytest.mark.parametrize("release", HALVES)
def test_case_47_a_flag_that_halves_running_requests(release: str, ran: Ran) -> None:
    flag = Intervention("flag", arguments=(HALVES[release],))
    found = checked(release, ran(release), ran(release, *flag.arguments), flag)
    (problem,) = found.problems
    assert "max_running_requests is 26 in this arm and 48 in the baseline" in problem


PREFILL_OFF = {
    "sglang-0.5.12": ("--enable-symm-mem", "--disable-piecewise-cuda-graph is set"),
    "sglang-0.5.23": ("--enable-two-batch-overlap", "incompatible with two-batch overlap"),
}


@pytest.mark.parametrize("release", PREFILL_OFF)
def test_case_47_a_flag_that_turns_prefill_graphs_off(release: str, ran: Ran) -> None:
    argument, reason = PREFILL_OFF[release]
    flag = Intervention("flag", arguments=(argument,))
    found = checked(release, ran(release), ran(release, argument), flag)
    assert any("prefill_graphs" in problem and reason in problem for problem in found.problems)


def test_case_47_prefill_graphs_that_were_asked_for_in_0_5_9(ran: Ran) -> None:
    release = "sglang-0.5.9"
    flag = Intervention("compile", arguments=("--enable-torch-compile",))
    asked = "--enable-piecewise-cuda-graph"
    found = checked(release, ran(release, asked), ran(release, asked, "--enable-torch-compile"), flag)
    assert any(
        "prefill_graphs" in problem and "conflict with torch compile" in problem for problem in found.problems
    )


def test_case_47_a_backend_that_downgrades_vllms_graphs(ran: Ran) -> None:
    release = "vllm-0.33.0"
    flag = Intervention("attention", arguments=("--attention-backend", "x"))
    found = checked(release, ran(release), ran(release, *flag.arguments), flag)
    assert any(
        "decode_graphs" in problem and "setting cudagraph_mode=PIECEWISE" in problem
        for problem in found.problems
    )


@pytest.mark.parametrize("release", RELEASES)
def test_case_47_a_variable_that_costs_kv_tokens(release: str, ran: Ran) -> None:
    variable = Intervention("buffers", environment={"NCCL_BUFFSIZE": "33554432"})
    found = checked(release, ran(release), ran(release, NCCL_BUFFSIZE="33554432"), variable)
    assert any(problem.startswith("kv_tokens is 38") for problem in found.problems)


@pytest.mark.parametrize("release", RELEASES)
def test_config_arm_reads_the_file_it_installed(release: str, ran: Ran, tmp_path: Path) -> None:
    root = tmp_path / "root"
    config_folder(release, root).mkdir(parents=True)
    baseline = ran(release, configs=root)
    placed = write_configs(release, root)
    tuned = Intervention("tuned", configs=tuple(placed))
    arm = ran(release, "--host", "127.0.0.1", configs=root)
    found = checked(release, baseline, arm, tuned, installed=placed)
    assert (found.problems, found.proof) == ((), Proof.ACTIVE)
    assert {d.declared for d in found.differences} == {True}
    assert all(any(path in line for line in found.evidence) for path in placed)


@pytest.mark.parametrize("release", RELEASES)
def test_case_48_a_file_in_the_wrong_place_is_not_read(release: str, ran: Ran, tmp_path: Path) -> None:
    root = tmp_path / "root"
    config_folder(release, root).mkdir(parents=True)
    placed = write_configs(release, tmp_path / "elsewhere")
    tuned = Intervention("tuned", configs=tuple(placed))
    found = checked(
        release, ran(release, configs=root), ran(release, "--host", "127.0.0.1", configs=root), tuned,
        installed=placed,
    )  # fmt: skip
    assert found.proof is Proof.NOT_SEEN
    assert any(FILE in problem and "default" in problem for problem in found.problems)


@pytest.mark.parametrize("release", SGLANG)
def test_deterministic_mode_voids_config_arms(release: str, ran: Ran, tmp_path: Path) -> None:
    root = tmp_path / "root"
    config_folder(release, root).mkdir(parents=True)
    flag = "--enable-deterministic-inference"
    baseline = ran(release, flag, configs=root)
    placed = write_configs(release, root)
    arm = ran(release, flag, "--host", "127.0.0.1", configs=root)
    tuned = Intervention("tuned", configs=tuple(placed))
    found = checked(release, baseline, arm, tuned, installed=placed)
    assert found.proof is Proof.NOT_SEEN
    assert any("deterministic inference is on" in problem for problem in found.problems)


@pytest.mark.parametrize("release", RELEASES)
def test_refused_fusion_cannot_activate(release: str, ran: Ran) -> None:
    rule = Rule(
        active=("FlashInfer AllReduce Fusion enabled", "FlashInfer workspace initialized"),
        refused=("Failed to initialize FlashInfer workspace", "FlashInfer workspace preflight",
                 "Failed to initialize Flashinfer allreduce workspace"),
        what="all-reduce fusion",
    )  # fmt: skip
    fusion = Intervention("fusion", environment={"RECORDED_FAULT": "fusion-refused"})
    texts = texts_to_look_for((fusion,), (rule,))
    arm = ran(release, looked_for=texts, RECORDED_FAULT="fusion-refused")
    found = checked(release, ran(release), arm, fusion, rule)
    assert found.proof is Proof.REFUSED
    assert any("orkspace" in line for line in found.evidence)


@pytest.mark.parametrize("release", ["sglang-0.5.9", "sglang-0.5.12"])
def test_fusion_that_is_silently_not_used_is_not_active(release: str, ran: Ran) -> None:
    """On these GPUs the two releases take the flag and do nothing: only the missing line tells."""
    rule = Rule(active=("FlashInfer workspace initialized for rank",), what="all-reduce fusion")
    flag = Intervention("fusion", arguments=("--enable-flashinfer-allreduce-fusion",))
    found = checked(release, ran(release), ran(release, *flag.arguments), flag, rule)
    assert found.proof is Proof.NOT_SEEN


@pytest.mark.parametrize("release", RELEASES)
def test_cache_that_varies_by_start_is_told(release: str, ran: Ran) -> None:
    varying = [
        ran(release, "--host", host, RECORDED_FAULT="kv-varies") for host in ("127.0.0.1", "localhost")
    ]
    found = check_arm(
        varying, [ran(release)], (NOTHING,), declared=frozenset(), proofs=(), server="x", version=""
    )
    assert any("starts of the baseline differ in kv_tokens" in problem for problem in found.problems)
