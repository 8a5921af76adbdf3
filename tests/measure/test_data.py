"""Room for rows in sorted order: taken once, as much as is asked for; none is the fault of who asks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moetune.domain.kernel_format import KernelFormat, kernel_format
from moetune.domain.quantization import Dtype, Quantization
from moetune.measure.data import SortedBuffers
from moetune.measure.operands import OperandMaker
from moetune.measure.worker import ConfigError
from tests.measure.test_worker import SMALL

FP8 = replace(SMALL, K=128, N=128, quantization=Quantization(Dtype.FP8_W8A8, "made", (128, 128)))


def buffers() -> SortedBuffers:
    kind = kernel_format(FP8)
    assert isinstance(kind, KernelFormat)
    cpu = torch.device("cpu")
    return SortedBuffers(FP8, OperandMaker(kind, cpu, torch.Generator().manual_seed(0)), cpu)


def test_rows_are_allocated_once_and_again_for_more() -> None:
    made = buffers()
    wide, narrow, activations = made.wide(40), made.narrow(40), made.activations(40)
    assert wide.shape == (40, 2 * FP8.N)
    assert narrow.shape == activations.values.shape == (40, FP8.N)
    assert activations.scales is not None
    assert activations.scales.shape == (40, 1)
    # A graph that was captured holds these addresses: fewer rows are the first of the same.
    assert made.wide(30).data_ptr() == wide.data_ptr()
    assert made.narrow(30).data_ptr() == narrow.data_ptr()
    assert made.activations(30).values.data_ptr() == activations.values.data_ptr()
    assert made.wide(50).shape == (50, 2 * FP8.N)
    assert made.narrow(50).shape == made.activations(50).values.shape == (50, FP8.N)


def test_no_room_is_the_fault_of_the_config_that_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = buffers()

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    for ask in (made.wide, made.activations, made.narrow):
        with pytest.raises(ConfigError, match="no room for rows in sorted order"):
            ask(8)
