from __future__ import annotations

import gzip
import json
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.applications.doctor_reader import MAX_RATIO
from moetune.applications.trace import read_trace
from moetune.domain.errors import InputError
from tests.applications.made_traces import LAYER, MadeStep, events, write_trace

if TYPE_CHECKING:
    from collections.abc import Callable

DECODE = MadeStep(wait_us=80.0)
PREFILL = MadeStep("step[EXTEND bs=2 toks=4096]", layers=2, graph=False)


def test_steps_of_sglang(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path / "1-TP-0.trace.json.gz", events([DECODE, PREFILL, DECODE])))
    assert trace.how == "named"
    assert trace.server == "sglang"
    assert [(step.phase, step.tokens) for step in trace.steps] == [
        ("decode", 64),
        ("prefill", 4096),
        ("decode", 64),
    ]
    decode, prefill, last = (step.time for step in trace.steps)
    assert (decode.wall_us, decode.up_us, decode.down_us) == (400.0, 48.0, 32.0)
    assert decode.share == pytest.approx(0.2)
    assert (prefill.wall_us, prefill.moe_us) == (160.0, 40.0)
    assert last.wall_us == 320.0
    assert trace.runners == (("Triton", 200.0),)
    assert dict(trace.parts)["all-reduce"] == 160.0
    assert trace.top_kernels == (("attention_kernel", 300.0),)
    assert trace.problems == ()


REAL = Path(__file__).parent / "data" / "torch-2.11_h200.trace.json.gz"
"""Written on an H200 by `python -m benchmarks.h200.trace`, 2026-12-02: 12 graphs, one step launched alone."""


def test_a_trace_that_torch_really_wrote() -> None:
    trace = read_trace(REAL)
    assert trace.how == "named"
    assert [(step.phase, step.tokens) for step in trace.steps] == [("decode", 64)] * 12 + [("prefill", 2048)]
    layers = 8
    for step in trace.steps:
        assert step.time.moe_kernels == 2 * layers
        assert step.time.up_us is not None
        assert step.time.down_us is not None
        # What events on the same machine gave for the two kernels, each alone.
        assert step.time.up_us / layers == pytest.approx(156.15, rel=0.02)
        assert step.time.down_us / layers == pytest.approx(78.80, rel=0.02)
    assert trace.runners[0][0] == "Triton"
    assert trace.problems == ()


def test_a_kernel_belongs_to_the_step_that_launched_it(tmp_path: Path) -> None:
    # The second step is launched while the first still runs, as with overlapped scheduling.
    found = events([MadeStep("step[DECODE bs=8]"), MadeStep("step[DECODE bs=16]")])
    spans = (
        [event for event in found if event["cat"] == "user_annotation"]
        if all("cat" in e for e in found)
        else []
    )
    spans = [event for event in found if event.get("cat") == "user_annotation"]
    launches = [event for event in found if event.get("cat") == "cuda_runtime"]
    spans[1]["ts"], launches[1]["ts"] = spans[0]["ts"] + 31, spans[0]["ts"] + 40
    trace = read_trace(write_trace(tmp_path / "t.json", found))
    assert [(step.tokens, step.time.moe_kernels) for step in trace.steps] == [(8, 8), (16, 8)]


def test_without_launches_the_ranges_on_the_gpu_name_the_steps(tmp_path: Path) -> None:
    made = events([DECODE, PREFILL], launches=False, gpu_spans=True)
    trace = read_trace(write_trace(tmp_path / "t.json", made))
    assert [(step.phase, step.time.moe_us) for step in trace.steps] == [("decode", 80.0), ("prefill", 40.0)]


def test_releases_that_name_no_steps_have_graphs(tmp_path: Path) -> None:
    # SGLang 0.5.6 and 0.5.9. The small graph is no step: one layer alone.
    unnamed = [MadeStep("", wait_us=10.0), MadeStep("", layers=1), MadeStep("")]
    trace = read_trace(write_trace(tmp_path / "t.json", events(unnamed)))
    assert trace.how == "graphs"
    assert [(step.phase, step.tokens, step.time.moe_us) for step in trace.steps] == [
        ("decode", None, 80.0)
    ] * 2


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("17-TP-0-EXTEND.trace.json.gz", "prefill"),
        ("17-TP-0-DECODE.trace.json.gz", "decode"),
        ("rank0.json", "unknown"),
    ],
)
def test_without_names_and_graphs_the_file_is_one_step(name: str, phase: str, tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path / name, events([MadeStep("", graph=False)] * 2)))
    assert trace.how == "whole"
    (step,) = trace.steps
    assert (step.phase, step.time.wall_us, step.time.moe_us) == (phase, 640.0, 160.0)


def test_other_runners_are_recognised(tmp_path: Path) -> None:
    marlin = [("void marlin_moe_wna16::Marlin<__nv_bfloat16>()", 20.0), *LAYER[:1]]
    trace = read_trace(write_trace(tmp_path / "t.json", events([MadeStep(kernels=marlin)])))
    assert trace.runners == (("Marlin", 80.0),)


def test_parallel_streams_are_a_union(tmp_path: Path) -> None:
    found = events([MadeStep(layers=1, kernels=(("attention_kernel", 100.0), ("fused_moe_kernel", 10.0)))])
    twin = dict(next(event for event in found if event["name"] == "fused_moe_kernel"))
    trace = read_trace(write_trace(tmp_path / "t.json", [*found, twin]))
    assert trace.steps[0].time.moe_us == 10.0


def test_a_trace_that_is_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    cut = tmp_path / "cut.json"
    text = write_trace(tmp_path / "t.json", events([DECODE] * 4)).read_text()
    # Annotations stand last: without the last one its step has no name.
    cut.write_text(text[: text.rindex('"user_annotation"')])
    trace = read_trace(cut)
    assert trace.problems == ("it is cut off: what stands before the cut was read",)
    assert [step.time.moe_kernels for step in trace.steps] == [8, 8, 8]


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "no trace": (lambda: b'{"a": 1}', "no traceEvents"),
    "no JSON": (lambda: b"hello, this is a text", "no traceEvents"),
    "no objects": (lambda: b'{"traceEvents": [1, 2]}', "no JSON object"),
    "no kernels": (lambda: b'{"traceEvents": []}', "no GPU kernels"),
    "an endless event": (lambda: b'{"traceEvents": [{"name": "' + b"x" * (3 << 20), "damaged or larger"),
    "deep": (lambda: b'{"traceEvents": [{"args": ' + b"[" * (2 << 20), "damaged or larger"),
    "empty": (lambda: b"", "empty"),
    "binary": (lambda: bytes(range(256)) * 64, "binary"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_trace_is_refused(case: str, tmp_path: Path) -> None:
    make, message = BAD[case]
    path = tmp_path / "t.json"
    path.write_bytes(make())
    with pytest.raises(InputError, match=message):
        read_trace(path)


def test_what_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(tmp_path / "nothing.json")


def test_a_gzip_bomb_is_left_early(tmp_path: Path) -> None:
    head = write_trace(tmp_path / "t.json", events([DECODE])).read_text().rpartition("]")[0].encode()
    packer = zlib.compressobj(9, wbits=31)
    blank = b" " * (1 << 20)
    bomb = packer.compress(head) + b"".join(packer.compress(blank) for _ in range(256)) + packer.flush()
    path = tmp_path / "t.json.gz"
    path.write_bytes(bomb)
    assert 256 * len(blank) / len(bomb) > MAX_RATIO
    trace = read_trace(path)
    assert any("expands to more than" in problem for problem in trace.problems)


ODD: list[dict[str, Any]] = [
    {"ph": "X", "cat": "kernel", "name": "fused_moe_kernel", "ts": "soon", "dur": 1},
    {"ph": "X", "cat": "kernel", "name": "fused_moe_kernel", "ts": 1.0, "dur": -1},
    {"ph": "X", "cat": "kernel", "name": ["fused_moe_kernel"], "ts": 1.0, "dur": 1},
    {"ph": "X", "cat": "kernel", "name": "fused_moe_kernel", "ts": True, "dur": 1},
    {"ph": "X", "cat": "kernel", "name": "fused_moe_kernel", "ts": float("inf"), "dur": 1},
    {"ph": "X", "cat": "kernel"},
    {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "ts": 1,
        "dur": 1,
        "args": {"correlation": -4},
    },
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1, "dur": 1, "args": [4]},
    {},
]


def test_odd_events_are_passed_over(tmp_path: Path) -> None:
    plain = read_trace(write_trace(tmp_path / "t.json", events([DECODE])))
    odd = read_trace(write_trace(tmp_path / "t.json", [*ODD, *events([DECODE]), *ODD]))
    assert odd == plain


def test_a_name_never_reaches_a_terminal_raw(tmp_path: Path) -> None:
    found = events([MadeStep(kernels=(*LAYER, ("evil\x1b[2J\x07kernel", 500.0)))])
    trace = read_trace(write_trace(tmp_path / "t.json", found))
    shown = " ".join(name for name, _ in trace.top_kernels)
    assert "evil" in shown
    assert shown.isprintable()


@given(st.binary(max_size=300))
def test_any_bytes_are_a_trace_or_an_input_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("traces") / "t.json"
    for content in (data, b'{"traceEvents": [' + data, gzip.compress(data)):
        path.write_bytes(content)
        with suppress(InputError):
            read_trace(path)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["ph", "cat", "name", "ts", "dur", "args", "correlation"]), inner
            )
        ),
        max_leaves=12,
    )
)
def test_any_event_is_read_or_passed_over(tmp_path_factory: pytest.TempPathFactory, event: object) -> None:
    path = tmp_path_factory.mktemp("traces") / "t.json"
    made = events([MadeStep(layers=1)])
    body = [event] if isinstance(event, dict) else []
    path.write_text(json.dumps({"traceEvents": [*made, *body]}))
    assert read_trace(path).steps
