"""Runs moetune's kernel in Triton's interpreter, in a process of its own.

TRITON_INTERPRET has to be set before Triton is imported, and the rest of the suite compiles for real.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Case:
    """One run of the kernel on made-up data.

    Attributes:
        tokens: M.
        config: BLOCK_SIZE_M, _N, _K, GROUP_SIZE_M.
        block: columns and K columns that share a scale, 0 without scales.
        idle_experts: experts below this number get no token.
        elsewhere: experts from this number on are held by another rank, None for none.
        padded_multiple: what the padded length is rounded up to.
        scales: beside block scales: `tensor`, `channel`, `group`.
        weight: type of the weights where it is not that of the activations: `i8`, or `u4` and `u8` in groups.
        group_size: weights along K that share a scale.
        zero_point: groups have a zero point of their own.
        summed: the kernel adds up the topk results of each token.
        in_order: rows lie in the order of the sorted slots, those that up writes or down reads.
        by_descriptor: tiles come through descriptors, those of the weights and of rows in order.
    """

    kernel: str = "up"
    tokens: int = 7
    experts: int = 5
    topk: int = 2
    n: int = 96
    k: int = 128
    operand: str = "bf16"
    config: tuple[int, int, int, int] = (16, 32, 64, 1)
    block: int = 0
    swap_ab: bool = False
    bias: bool = False
    idle_experts: int = 0
    elsewhere: int | None = None
    padded_multiple: int = 4
    scales: str = "none"
    weight: str = ""
    group_size: int = 0
    zero_point: bool = False
    summed: bool = False
    in_order: bool = False
    by_descriptor: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Attributes:
        relative_error: against the fp32 reference; NaN where something of the output was not written.
        worst_row_error: the largest of single rows, which a whole norm could hide.
        untouched: guard values around the output that were overwritten.
        reference_norm: to see that there was something to compute.
    """

    relative_error: float
    worst_row_error: float
    untouched: bool
    reference_norm: float


def interpret(cases: list[Case]) -> list[Outcome]:
    """Run cases in Triton's interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.measure.interpreted"],
        input=json.dumps([asdict(case) for case in cases]),
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    # -11: it read or wrote beyond its tensors.
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-3000:]}"
    return [Outcome(**value) for value in json.loads(done.stdout)]


def _multiply_bf16_as_numbers() -> None:
    """Triton 3.6's interpreter keeps bf16 as 16-bit integers; its dot multiplies those, and integers stay.

    An integer that becomes a bf16 goes by way of a float32 here, which holds those of 8 bits.
    """
    import numpy as np
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create_dot = InterpreterBuilder.create_dot

    def as_float32(handle: Any) -> Any:
        if handle.dtype.scalar != bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), float32)

    def patched(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, as_float32(a), as_float32(b), *rest)

    def to_bf16_by_float32(self: Any, source: Any, target: Any) -> Any:
        if target.scalar != bfloat16:
            return self.cast_impl(source, target)
        return self.cast_impl(TensorHandle(source.data.astype(np.float32), float32), target)

    InterpreterBuilder.create_dot = patched
    InterpreterBuilder.create_si_to_fp = to_bf16_by_float32


def _add_bf16_atomically() -> None:
    """Triton 3.6's interpreter has no atomic addition of bf16. One program runs after the other there.

    Added in fp32 and rounded to nearest, as sm_90 does.
    """
    import numpy as np
    import torch
    from triton.language import bfloat16
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _interpreter

    create_atomic_rmw = InterpreterBuilder.create_atomic_rmw

    def numbers(words: Any) -> torch.Tensor:
        return torch.from_numpy((words.astype(np.uint32) << 16).view(np.float32).copy())

    def patched(self: Any, operation: Any, pointer: Any, value: Any, mask: Any, *rest: Any) -> Any:
        if value.dtype.scalar != bfloat16:
            return create_atomic_rmw(self, operation, pointer, value, mask, *rest)
        meant = pointer.data[mask.data]
        assert np.unique(meant).size == meant.size, "one tile adds twice to one place"
        before = _interpreter.load(pointer.data, mask.data, np.zeros_like(value.data), value.data.dtype)
        total = (numbers(before) + numbers(value.data)).to(torch.bfloat16)
        _interpreter.store(pointer.data, total.view(torch.int16).numpy().view(value.data.dtype), mask.data)
        return TensorHandle(before, bfloat16)

    InterpreterBuilder.create_atomic_rmw = patched


def patch_interpreter() -> None:
    """Make up for what Triton 3.6's interpreter does not do with bf16."""
    _multiply_bf16_as_numbers()
    _add_bf16_atomically()


def _main() -> None:
    patch_interpreter()
    from tests.measure.made_up import run_case

    cases = json.load(sys.stdin)
    outcomes = [run_case(Case(**{**case, "config": tuple(case["config"])}), "cpu") for case in cases]
    json.dump([asdict(outcome) for outcome in outcomes], sys.stdout)


if __name__ == "__main__":
    _main()
