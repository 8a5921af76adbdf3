"""Which backend vLLM chooses: against the wheels' own oracles, and as a user relies on it."""

from __future__ import annotations

import ast
import itertools
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from moetune.domain.gpu import Gpu
from moetune.domain.problem import Parallelism
from moetune.domain.quantization import Quantization
from moetune.domain.version import parse_release
from moetune.servers.protocol import Applies, RunnerVerdict, ServerOptions
from moetune.servers.vllm.runner import choose_runner, explain_runner, runner_rules
from tests.servers import runner_inputs as use
from tests.servers.runner_inputs import AMD, candidates, layer, nvidia
from tests.servers.vllm_runner_oracle import ask
from tests.wheels import read_member

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moetune.servers.runner_rules import Decision, Rule

NEWEST = "0.33.0"
YES, NO, PARTLY, UNKNOWN = Applies.YES, Applies.NO, Applies.PARTLY, Applies.UNKNOWN
DEEPEP = "deepep_low_latency"


def explain(
    version: str = NEWEST,
    quantization: Quantization = use.BF16,
    capability: int | None = 90,
    *,
    architecture: str = "SomeForCausalLM",
    model_type: str = "",
    gpu: Gpu | None = None,
    parallelism: Parallelism | None = None,
    intermediate: int = 1024,
    gated: bool = True,
    bias: bool = False,
    quantization_flag: str | None = None,
    **options: Any,
) -> Decision:
    return explain_runner(
        parse_release(version),
        layer(
            quantization,
            architecture,
            intermediate=intermediate,
            gated=gated,
            bias=bias,
            model_type=model_type,
        ),
        parallelism or Parallelism(),
        gpu or nvidia(capability),
        ServerOptions(quantization=quantization_flag, **options),
    )


def verdict(*args: Any, **kwargs: Any) -> RunnerVerdict:
    return explain(*args, **kwargs).verdict


# --- what a user relies on --------------------------------------------------------------------------


def test_qwen35_in_bf16_on_sm120_is_not_applicable() -> None:
    chosen = choose_runner(
        (0, 33, 0),
        layer(use.BF16, "Qwen3_5MoeForConditionalGeneration", hidden=3072),
        Parallelism(tp=4),
        nvidia(120),
        ServerOptions(),
    )
    assert (chosen.runner, chosen.applies, chosen.certainty) == ("FLASHINFER_CUTLASS", NO, "run")
    assert chosen.force_triton == "--moe-backend triton"
    forced = verdict(NEWEST, use.BF16, 120, moe_runner_backend="triton")
    assert (forced.runner, forced.applies) == ("TRITON", YES)
    assert verdict(NEWEST, use.BF16, 120, flashinfer=False).runner == "TRITON"
    assert verdict(NEWEST, use.BF16, 120, parallelism=Parallelism(tp=2, dp=2)).runner == "TRITON"


@pytest.mark.parametrize("quantization", [use.AWQ, use.GPTQ, use.CT_INT4])
@pytest.mark.parametrize("version", ["0.10.2", "0.13.0", "0.20.0", NEWEST])
def test_case_04_awq_and_gptq_go_to_marlin(quantization: Quantization, version: str) -> None:
    chosen = verdict(version, quantization, 90)
    assert (chosen.runner.upper(), chosen.applies) == ("MARLIN", NO)


@pytest.mark.parametrize("quantization", [use.BF16, use.FP8_BLOCK, use.AWQ])
def test_case_05_batch_invariance_ignores_every_file(quantization: Quantization) -> None:
    for chosen in (
        verdict(NEWEST, quantization, deterministic=True),
        verdict("0.11.1", quantization, environment={"VLLM_BATCH_INVARIANT": "1"}),
    ):
        assert chosen.applies is NO
        assert chosen.force_triton == "unset VLLM_BATCH_INVARIANT"
    assert verdict("0.11.0", use.BF16, environment={"VLLM_BATCH_INVARIANT": "1"}).applies is YES


@pytest.mark.parametrize(
    "inputs",
    [
        {"quantization": use.W8A8_INT8},
        {"quantization": Quantization(use.FP8_BLOCK.dtype, "fancy8")},
        {"capability": None},
        {"version": "0.10.1"},
        {"parallelism": Parallelism(tp=2, dp=2, ep=2), "moe_a2a_backend": "moonep"},
        {"gpu": Gpu("Intel(R) Arc(TM) Pro B60 Graphics", vendor="Intel")},
    ],
)
def test_without_a_rule_it_says_unknown(inputs: dict[str, Any]) -> None:
    chosen = verdict(**inputs)
    assert (chosen.runner, chosen.applies) == ("", UNKNOWN)


def test_a_release_between_wheels_is_inferred_where_the_next_one_differs() -> None:
    changed = verdict("0.24.0", use.BF16, 90)
    assert (changed.runner, changed.certainty) == ("FLASHINFER_CUTLASS", "inferred")
    assert "0.27.1 differs" in changed.reason
    assert verdict("0.30.0", use.BF16, 90).certainty == "run"
    assert verdict("0.34.0", use.BF16, 90).certainty == "inferred"


# --- the automatic result of 0.33.0, row by row -----------------------------------------------------

COLUMNS = (80, 86, 89, 90, 100, 103, 110, 120, 121)
Row = tuple[tuple[str, Applies], ...]


def row(old: str, ada: str, hopper: str, blackwell: str, thor: str, sm120: str) -> Row:
    """One row of the table, its columns as in COLUMNS."""
    cells = [old, old, ada, hopper, blackwell, blackwell, thor, sm120, sm120]
    return tuple((cell, YES if cell.startswith("TRITON") and "OAI" not in cell else NO) for cell in cells)


FI, TRT, OAI = "FLASHINFER_CUTLASS", "FLASHINFER_TRTLLM", "TRITON = OAITriton (triton_kernels)"
FP4 = "FlashInfer, CUTLASS, DeepGEMM or Marlin"
WNA16 = "TRITON (TritonWNA16Experts)"
AUTO_TABLE: dict[str, tuple[Quantization, dict[str, Any], Row]] = {
    "bf16": (use.BF16, {}, row("TRITON", "TRITON", "TRITON", TRT, "TRITON", FI)),
    "fp8 block": (use.FP8_BLOCK, {}, row("MARLIN", "TRITON", "TRITON", TRT, "TRITON", "DEEPGEMM")),
    "fp8 block, EP": (
        use.FP8_BLOCK,
        {"parallelism": Parallelism(tp=4, ep=4)},
        row("MARLIN", "TRITON", FI, TRT, "TRITON", "DEEPGEMM"),
    ),
    "fp8 static": (use.FP8_STATIC, {}, row("MARLIN", "TRITON", FI, TRT, "TRITON", FI)),
    "modelopt fp8": (use.MODELOPT_FP8, {}, row("MARLIN", "TRITON", FI, TRT, "TRITON", FI)),
    "fp8 dynamic": (use.FP8_DYNAMIC, {}, row("MARLIN", *["TRITON"] * 5)),
    "ct int8": (use.CT_INT8, {}, row(*["TRITON"] * 6)),
    "experts_int8": (use.EXPERTS_INT8, {}, row(*["TRITON"] * 6)),
    "awq": (use.AWQ, {}, row(*["MARLIN"] * 6)),
    "gptq": (use.GPTQ, {}, row(*["MARLIN"] * 6)),
    "ct w4a16": (use.CT_INT4, {}, row(*["MARLIN"] * 6)),
    "192 a rank with g128": (
        use.GPTQ,
        {"intermediate": 768, "parallelism": Parallelism(tp=4)},
        row(*[WNA16] * 6),
    ),
    "moe_wna16": (use.AWQ, {"quantization_flag": "moe_wna16"}, row(*[WNA16] * 6)),
    "mxfp4": (use.MXFP4, {}, row("MARLIN", "MARLIN", OAI, "FLASHINFER_TRTLLM_MXFP4", OAI, "MARLIN")),
    "nvfp4": (use.NVFP4, {}, row(*[FP4] * 6)),
    "mxfp8": (use.MXFP8, {}, row(*[FP4] * 6)),
    "bf16, no flashinfer": (use.BF16, {"flashinfer": False}, row(*["TRITON"] * 6)),
    "fp8 static, no flashinfer": (use.FP8_STATIC, {"flashinfer": False}, row("MARLIN", *["TRITON"] * 5)),
}


@pytest.mark.parametrize("name", AUTO_TABLE)
@pytest.mark.parametrize("column", range(len(COLUMNS)), ids=[f"sm{c}" for c in COLUMNS])
def test_auto_table_of_0_33(name: str, column: int) -> None:
    quantization, inputs, cells = AUTO_TABLE[name]
    chosen = verdict(NEWEST, quantization, COLUMNS[column], **inputs)
    assert (chosen.runner, chosen.applies) == cells[column]


CT_CHANNEL_ROW = {
    80: ("MARLIN", NO),
    89: ("TRITON", YES),
    90: ("VLLM_CUTLASS", NO),
    100: ("VLLM_CUTLASS, TRITON for m up to 8", PARTLY),
    103: ("VLLM_CUTLASS, TRITON for m up to 8", PARTLY),
    110: ("TRITON", YES),
    120: ("TRITON", YES),
}


@pytest.mark.parametrize("capability", CT_CHANNEL_ROW)
def test_compressed_tensors_channel_row_of_0_33(capability: int) -> None:
    chosen = verdict(NEWEST, use.CT_CHANNEL, capability)
    assert (chosen.runner, chosen.applies) == CT_CHANNEL_ROW[capability]


NO_DEEP_GEMM = {"environment": {"VLLM_USE_DEEP_GEMM": "0"}}
SEVERAL = {"parallelism": Parallelism(dp=2, ep=2)}
OTHER_ROWS = [
    ("ll bf16", "0.33.0", use.BF16, 90, SEVERAL | {"moe_a2a_backend": DEEPEP}, "BATCHED_TRITON", YES),
    ("ll block", "0.33.0", use.FP8_BLOCK, 90, SEVERAL | {"moe_a2a_backend": DEEPEP}, "BATCHED_DEEPGEMM", NO),
    ("ll old", "0.33.0", use.FP8_BLOCK, 80, SEVERAL | {"moe_a2a_backend": DEEPEP}, "refused", NO),
    (
        "ll ct",
        "0.33.0",
        use.CT_CHANNEL,
        90,
        SEVERAL | {"moe_a2a_backend": DEEPEP},
        "BATCHED_VLLM_CUTLASS",
        NO,
    ),
    (
        "ht bf16",
        "0.33.0",
        use.BF16,
        100,
        SEVERAL | {"moe_a2a_backend": "deepep_high_throughput"},
        "TRITON",
        YES,
    ),
    (
        "block sm120 off",
        "0.33.0",
        use.FP8_BLOCK,
        120,
        NO_DEEP_GEMM,
        "TRITON",
        YES,
    ),
    (
        "threshold",
        "0.33.0",
        use.FP8_BLOCK,
        120,
        {"environment": {"VLLM_USE_DEEP_GEMM_E8M0": "0"}},
        "DEEPGEMM, TRITON for small m",
        PARTLY,
    ),
    ("qwen3.5", "0.33.0", use.FP8_BLOCK, 120, {"model_type": "qwen3_5_moe_text"}, "TRITON", YES),
    ("0.20 hopper", "0.20.0", use.BF16, 90, {}, "FLASHINFER_CUTLASS", NO),
    ("0.20 thor", "0.20.0", use.BF16, 110, {}, "FLASHINFER_CUTLASS", NO),
    ("0.20 dp", "0.20.0", use.BF16, 90, {"parallelism": Parallelism(dp=2)}, "TRITON", YES),
    ("0.20 block sm120", "0.20.0", use.FP8_BLOCK, 120, {}, "TRITON", YES),
    (
        "0.20 without flashinfer",
        "0.20.0",
        use.BF16,
        90,
        {"environment": {"VLLM_USE_FLASHINFER_MOE_FP16": "0"}},
        "TRITON",
        YES,
    ),
    ("0.20 gpt-oss", "0.20.0", use.MXFP4, 90, {}, "MARLIN", NO),
    ("0.20 moe_wna16", "0.20.0", use.AWQ, 90, {"quantization_flag": "moe_wna16"}, "Triton WNA16", YES),
    ("0.11 bf16", "0.11.0", use.BF16, 120, {}, "Triton", YES),
    (
        "0.11 flashinfer",
        "0.11.0",
        use.BF16,
        90,
        {"parallelism": Parallelism(tp=4, ep=4), "environment": {"VLLM_USE_FLASHINFER_MOE_FP16": "1"}},
        "FlashInfer CUTLASS",
        NO,
    ),
    ("0.11 block", "0.11.0", use.FP8_BLOCK, 90, {}, "Triton, or DeepGEMM with Triton below", PARTLY),
    (
        "0.11 block off",
        "0.11.0",
        use.FP8_BLOCK,
        90,
        NO_DEEP_GEMM,
        "Triton",
        YES,
    ),
    ("0.11 block sm120", "0.11.0", use.FP8_BLOCK, 120, {}, "Triton", YES),
    ("0.11 tensor", "0.11.0", use.FP8_STATIC, 90, {}, "Triton", YES),
    ("0.11 fp8 old", "0.11.0", use.FP8_STATIC, 80, {}, "Marlin", NO),
    ("0.11 ct sm90", "0.11.0", use.CT_CHANNEL, 90, {}, "CUTLASS", NO),
    ("0.11 ct sm100", "0.11.0", use.CT_CHANNEL, 100, {}, "CUTLASS, Triton for m up to 8", PARTLY),
    ("0.11 ct sm120", "0.11.0", use.CT_CHANNEL, 120, {}, "Triton", YES),
    ("0.11 int8", "0.11.0", use.CT_INT8, 80, {}, "Triton", YES),
    ("0.11 mxfp4", "0.11.0", use.MXFP4, 90, {}, "Marlin, triton_kernels or FlashInfer", NO),
    ("0.11 bitsandbytes", "0.11.0", use.BITSANDBYTES, 90, {}, "Triton", YES),
    ("0.33 bitsandbytes", "0.33.0", use.BITSANDBYTES, 90, {}, "refused", NO),
    ("0.12 tp 8", "0.12.0", use.FP8_BLOCK, 90, {"parallelism": Parallelism(tp=8)}, "Triton", YES),
    (
        "emulation",
        "0.33.0",
        use.NVFP4,
        90,
        {"moe_runner_backend": "emulation"},
        "EMULATION (Triton kernel)",
        YES,
    ),
    ("no flag yet", "0.13.0", use.BF16, 90, {"moe_runner_backend": "triton"}, "refused", NO),
    ("awq, flag", "0.33.0", use.AWQ, 90, {"moe_runner_backend": "triton"}, "refused", NO),
    ("nvfp4, flag", "0.33.0", use.NVFP4, 120, {"moe_runner_backend": "triton"}, "refused", NO),
    ("mxfp4, flag", "0.33.0", use.MXFP4, 90, {"moe_runner_backend": "triton"}, OAI, NO),
]


@pytest.mark.parametrize(
    ("version", "quantization", "capability", "inputs", "runner", "applies"),
    [item[1:] for item in OTHER_ROWS],
    ids=[item[0] for item in OTHER_ROWS],
)
def test_other_rows(
    version: str,
    quantization: Quantization,
    capability: int,
    inputs: dict[str, Any],
    runner: str,
    applies: Applies,
) -> None:
    chosen = verdict(version, quantization, capability, **inputs)
    assert (chosen.runner, chosen.applies) == (runner, applies)


@pytest.mark.parametrize("version", ["0.11.0", "0.20.0", NEWEST])
@pytest.mark.parametrize("quantization", [use.BF16, use.FP8_BLOCK])
def test_rocm(version: str, quantization: Quantization) -> None:
    assert verdict(version, quantization, gpu=AMD).applies is YES
    aiter = verdict(version, quantization, gpu=AMD, environment={"VLLM_ROCM_USE_AITER": "1"})
    assert (aiter.runner, aiter.applies) == ("AITER", NO)
    off = {"VLLM_ROCM_USE_AITER": "1", "VLLM_ROCM_USE_AITER_MOE": "0"}
    assert verdict(version, quantization, gpu=AMD, environment=off).applies is YES


# --- against vLLM's own oracles ---------------------------------------------------------------------

SCHEMES: dict[str, Quantization] = {
    "bf16": use.BF16,
    "fp8-block": use.FP8_BLOCK,
    "fp8-tensor-static": use.FP8_STATIC,
    "fp8-tensor-dynamic": use.FP8_DYNAMIC,
    "ct-fp8-tensor-static": use.CT_STATIC,
    "ct-fp8-tensor-dynamic": use.CT_DYNAMIC,
    "ct-fp8-channel": use.CT_CHANNEL,
    "ct-fp8-block": use.CT_BLOCK,
    "int8": use.CT_INT8,
    "awq": use.AWQ,
    "gptq": use.GPTQ,
    "ct-w4a16": use.CT_INT4,
    "moe_wna16": use.GPTQ,
    "mxfp4": use.MXFP4,
    "nvfp4": use.NVFP4,
    "mxfp8": use.MXFP8,
}
# In 0.20.0 int4 layers do not ask their oracle about Triton.
NOT_ASKED = {"0.20.0": frozenset({"awq", "gptq", "ct-w4a16", "moe_wna16"}), NEWEST: frozenset[str]()}
PARALLEL: tuple[dict[str, Any], ...] = (
    {"tp": 4},
    {"tp": 4, "ep": True},
    {"dp": 2},
    {"dp": 2, "ep": True},
    {"dp": 2, "ep": True, "a2a": "deepep_high_throughput"},
    {"dp": 2, "ep": True, "a2a": DEEPEP},
    {"tp": 4, "ep": True, "a2a": DEEPEP},  # not in use without data parallelism
)
NOT_GATED = {"gated": False, "activation": "RELU2_NO_MUL"}
SITUATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"flashinfer": False},
    {"environment": {"VLLM_USE_DEEP_GEMM": "0"}},
    {"environment": {"VLLM_USE_DEEP_GEMM": "1"}},
    {"environment": {"VLLM_USE_FLASHINFER_MOE_FP8": "0", "VLLM_USE_FLASHINFER_MOE_FP16": "0"}},
    {"environment": {"VLLM_USE_FLASHINFER_MOE_FP8": "1", "VLLM_USE_FLASHINFER_MOE_FP16": "1"}},
    {"environment": {"VLLM_TEST_FORCE_FP8_MARLIN": "1"}},
    NOT_GATED,
    {"backend": "triton"},
    {"backend": "marlin"},
    {"lora": True},
    {"lora": True, **NOT_GATED},
    {"inter": 768},
    {"lora": True, "inter": 768},
    {"gpt_oss": True, "activation": "SWIGLUOAI"},
    {"model_type": "qwen3_5_moe_text"},
    {"model_type": "kolibri1"},
)
CAPABILITIES = (75, 89, 90, 100, 120)


def cases(version: str) -> Iterator[dict[str, Any]]:
    for scheme, parallel, situation in itertools.product(SCHEMES, PARALLEL, SITUATIONS):
        if scheme in NOT_ASKED[version] or (situation.get("gpt_oss") and scheme != "bf16"):
            continue
        if scheme == "awq" and situation.get("inter"):
            continue  # a shape that Marlin refuses never gets to the oracle as AWQ
        # The models that 0.20 names are taken off the dense layers only, outside of the oracle.
        if "model_type" in situation and (version != NEWEST or "block" not in scheme):
            continue
        for capability in CAPABILITIES:
            yield {"scheme": scheme, "cc": capability, **parallel, **situation}


def our_answer(version: str, case: dict[str, Any]) -> Decision:
    return explain(
        version,
        SCHEMES[case["scheme"]],
        case["cc"],
        architecture="GptOssForCausalLM" if case.get("gpt_oss") else "SomeForCausalLM",
        model_type=case.get("model_type", ""),
        parallelism=Parallelism(tp=case.get("tp", 1), dp=case.get("dp", 1), ep=2 if case.get("ep") else 1),
        intermediate=case.get("inter", 1024),
        gated=case.get("gated", True),
        quantization_flag="moe_wna16" if case["scheme"] == "moe_wna16" else None,
        moe_runner_backend=case.get("backend", "auto"),
        moe_a2a_backend=case.get("a2a", "none"),
        enable_lora=case.get("lora", False),
        environment=case.get("environment", {}),
        flashinfer=case.get("flashinfer"),
    )


# Verdicts that name several kernels, none of which reads the file.
LOOSE_NAMES = ("as named", "FlashInfer, CUTLASS", "a FlashInfer kernel")


def agrees(theirs: str, ours: RunnerVerdict, case: dict[str, Any]) -> bool:
    """Whether a verdict says what the oracle answered: the kernel, and whether it reads the file."""
    if theirs.startswith("error"):
        return ours.applies is NO
    if theirs in ("TRITON", "BATCHED_TRITON") and case["scheme"] != "mxfp4":
        return ours.applies is YES and ours.runner.split(" ")[0] == theirs
    if theirs == "VLLM_CUTLASS" and case["scheme"] != "nvfp4":
        return ours.runner.startswith(theirs) and ours.applies is (NO if case["cc"] < 100 else PARTLY)
    if ours.applies is not NO:
        return False
    if ours.runner.startswith(LOOSE_NAMES):
        return True
    name = {"BATCHED_MARLIN": "MARLIN"}.get(theirs, theirs)
    if case["scheme"] == "mxfp4" and name.startswith("FLASHINFER_TRTLLM"):
        name = "FLASHINFER_TRTLLM_MXFP4"
    return ours.runner.split(" ")[0] == name


@pytest.mark.parametrize("version", ["0.20.0", NEWEST])
def test_verdicts_equal_the_servers_own_oracles(version: str) -> None:
    asked = list(cases(version))
    answers = ask(version, asked)
    assert len(asked) == len(answers) > 4000
    wrong = [
        (case, theirs, ours)
        for case, theirs in zip(asked, answers, strict=True)
        if not agrees(theirs, (ours := our_answer(version, case)).verdict, case)
    ]
    assert not wrong, (len(wrong), wrong[0])
    kinds = {answer.split(":")[0] for answer in answers}
    assert {"TRITON", "BATCHED_TRITON", "MARLIN", "DEEPGEMM", "FLASHINFER_TRTLLM", "error"} <= kinds


@cache
def _first_selection(version: str) -> ast.FunctionDef:
    """`get_fp8_moe_backend`, the predecessor of the oracles."""
    tree = ast.parse(read_member("vllm", version, "vllm/model_executor/layers/quantization/fp8.py"))
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "get_fp8_moe_backend"]
    found[0].returns = None
    return found[0]


def first_backend(
    version: str, block: bool, capability: int, environment: dict[str, str], deep_gemm: bool
) -> str:
    """What the wheel's own `get_fp8_moe_backend` answers."""
    on = {name: value == "1" for name, value in environment.items()}
    platform = SimpleNamespace(
        is_cuda=lambda: True,
        is_rocm=lambda: False,
        is_device_capability=lambda wanted: capability == wanted,
        has_device_capability=lambda wanted: capability >= wanted,
    )
    names = SimpleNamespace(
        **{
            name: name
            for name in [
                "FLASHINFER_TRTLLM",
                "FLASHINFER_CUTLASS",
                "MARLIN",
                "DEEPGEMM",
                "CUTLASS_BLOCK_SCALED_GROUPED_GEMM",
                "TRITON",
            ]
        }
    )
    envs = SimpleNamespace(
        VLLM_USE_FLASHINFER_MOE_FP8=on.get("VLLM_USE_FLASHINFER_MOE_FP8", False),
        VLLM_TEST_FORCE_FP8_MARLIN=on.get("VLLM_TEST_FORCE_FP8_MARLIN", False),
        VLLM_USE_DEEP_GEMM=on.get("VLLM_USE_DEEP_GEMM", True),
        VLLM_MOE_USE_DEEP_GEMM=on.get("VLLM_MOE_USE_DEEP_GEMM", True),
    )
    space: dict[str, Any] = {
        "current_platform": platform,
        "Fp8MoeBackend": names,
        "envs": envs,
        "logger": SimpleNamespace(info_once=print, warning_once=print),
        "has_deep_gemm": lambda: deep_gemm,
        "is_deep_gemm_supported": lambda: capability in (90, 100),
        "has_flashinfer_moe": lambda: True,
        "get_flashinfer_moe_backend": lambda: "latency",
        "FlashinferMoeBackend": SimpleNamespace(TENSORRT_LLM="latency"),
    }
    code = compile(ast.Module(body=[_first_selection(version)], type_ignores=[]), "fp8.py", "exec")
    exec(code, space)
    return str(space["get_fp8_moe_backend"](block))


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"VLLM_USE_DEEP_GEMM": "0"},
        {"VLLM_MOE_USE_DEEP_GEMM": "0"},
        {"VLLM_USE_FLASHINFER_MOE_FP8": "1"},
        {"VLLM_TEST_FORCE_FP8_MARLIN": "1"},
    ],
)
def test_fp8_of_0_11_1_equals_the_servers_own(environment: dict[str, str]) -> None:
    for capability, block in itertools.product((75, 80, 86, 89, 90, 100, 103, 120), (False, True)):
        theirs = {first_backend("0.11.1", block, capability, environment, there) for there in (False, True)}
        quantization = use.FP8_BLOCK if block else use.FP8_STATIC
        ours = verdict("0.11.1", quantization, capability, environment=environment)
        if theirs == {"TRITON"}:
            assert ours.applies is YES, (capability, block, ours)
        elif "TRITON" in theirs or "CUTLASS_BLOCK_SCALED_GROUPED_GEMM" in theirs:
            assert ours.applies is PARTLY, (capability, block, ours)
        else:
            assert ours.applies is NO, (capability, block, ours)
            assert next(iter(theirs)).startswith(ours.runner.upper()), (capability, block, ours)


# --- the rules hang together ------------------------------------------------------------------------

VARIABLES = {
    "flashinfer_fp16": "VLLM_USE_FLASHINFER_MOE_FP16",
    "flashinfer_fp8": "VLLM_USE_FLASHINFER_MOE_FP8",
    "deep_gemm": "VLLM_USE_DEEP_GEMM",
    "deep_gemm_global": "VLLM_USE_DEEP_GEMM",
    "deep_gemm_moe": "VLLM_MOE_USE_DEEP_GEMM",
    "e8m0": "VLLM_USE_DEEP_GEMM_E8M0",
    "force_marlin": "VLLM_TEST_FORCE_FP8_MARLIN",
    "int4_flashinfer": "VLLM_USE_FLASHINFER_MOE_INT4",
    "aiter": "VLLM_ROCM_USE_AITER",
}


def inputs_for(rule: Rule) -> Iterator[dict[str, Any]]:
    """Deployments that could meet the conditions of a rule."""
    environment = {}
    for fact, variable in VARIABLES.items():
        value = candidates(rule, fact, ["unset"], ["unset", False])[0]
        if value not in ("unset", None):
            environment[variable] = "1" if value in ("on", True) else "0"
    gpus = [
        AMD if vendor == "amd" else nvidia(int(str(capability)))
        for vendor in candidates(rule, "vendor", ["nvidia"], ["amd"])
        for capability in candidates(rule, "cc", [90, 120, 100, 75])
    ]
    family = candidates(rule, "family", [""])[0]
    for version, architecture, checkpoint, gpu, backend, where, shape, flags in itertools.product(
        dict.fromkeys((rule.since, rule.until)),
        candidates(rule, "arch", ["SomeForCausalLM"], ["SomeForCausalLM"]),
        use.checkpoints(rule, (None, "moe_wna16", "gptq")),
        gpus[:4],
        candidates(rule, "backend", ["auto", "triton", "cutlass"], ["no_such_backend", "cutlass"])[:6],
        (
            ("none", Parallelism(tp=2)),
            ("none", Parallelism(tp=8)),
            ("none", Parallelism(tp=4, ep=2)),
            (DEEPEP, Parallelism(dp=2, ep=2)),
            ("deepep_high_throughput", Parallelism(dp=2, ep=2)),
            ("moonep", Parallelism(dp=2, ep=2)),
        ),
        (1024, 96),
        tuple(
            itertools.product(
                candidates(rule, "lora", [False]),
                candidates(rule, "gated", [True]),
                candidates(rule, "bias", [False]),
                candidates(rule, "flashinfer", [True, False]),
            )
        ),
    ):
        quantization, word = checkpoint
        (a2a, parallelism), (lora, gated, bias, flashinfer) = where, flags
        yield {
            "version": ".".join(map(str, version)),
            "quantization": quantization,
            "architecture": architecture,
            "model_type": family,
            "gpu": gpu,
            "moe_runner_backend": backend,
            "quantization_flag": word,
            "moe_a2a_backend": a2a,
            "parallelism": parallelism,
            "intermediate": shape,
            "enable_lora": bool(lora),
            "gated": bool(gated),
            "bias": bool(bias),
            "environment": environment,
            "deterministic": bool(candidates(rule, "invariant", [False])[0]),
            "flashinfer": bool(flashinfer),
        }


def with_its_choice(rule: Rule) -> Iterator[Rule]:
    """A rule on a chosen backend, together with each rule that chooses it."""
    kernels = [item.values or frozenset() for item in rule.conditions if item.fact == "kernel"]
    if not kernels:
        yield rule
    for choice in runner_rules().rules:
        if any(dict(choice.sets).get("kernel") in values for values in kernels):
            since, until = max(rule.since, choice.since), min(rule.until, choice.until)
            if since <= until:
                yield replace(rule, since=since, until=until, conditions=rule.conditions + choice.conditions)


@pytest.mark.parametrize("rule", runner_rules().rules, ids=lambda rule: rule.name)
def test_every_rule_can_be_reached(rule: Rule) -> None:
    met = itertools.chain.from_iterable(map(inputs_for, with_its_choice(rule)))
    assert any(rule.name in explain(**inputs).rules for inputs in met)


FORCES: dict[str, dict[str, Any]] = {
    "--moe-backend triton": {"moe_runner_backend": "triton"},
    "--quantization moe_wna16": {"quantization_flag": "moe_wna16", "moe_runner_backend": "auto"},
    "VLLM_USE_DEEP_GEMM=0": {"environment": {"VLLM_USE_DEEP_GEMM": "0"}},
}


def test_what_selects_triton_selects_triton() -> None:
    """The flag that a NOT APPLICABLE names leads to a backend that reads the file."""
    tried = 0
    for version, quantization, capability, parallelism, backend in itertools.product(
        ("0.10.2", "0.13.0", "0.20.0", "0.27.1", NEWEST),
        use.ALL_QUANTIZATIONS,
        (80, 89, 90, 100, 120),
        (Parallelism(tp=2), Parallelism(tp=2, ep=2)),
        ("auto", "flashinfer_cutlass"),
    ):
        inputs: dict[str, Any] = {
            "version": version,
            "quantization": quantization,
            "capability": capability,
            "parallelism": parallelism,
            "moe_runner_backend": backend,
        }
        chosen = verdict(**inputs)
        if chosen.force_triton in FORCES:
            tried += 1
            forced = verdict(**inputs | FORCES[chosen.force_triton])
            assert forced.applies is YES, (inputs, chosen, forced)
    assert tried > 150
