"""Weights, activations and outputs of one problem on a device, and launches on them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from moetune.domain.kernel_format import Scales
from moetune.domain.problem import KERNELS
from moetune.measure.alignment import ELSEWHERE, places_of_slots
from moetune.measure.between import SortedRows, activate, quantize
from moetune.measure.dequantizing_kernel import run_dequantizing_gemm
from moetune.measure.kernels import run_grouped_gemm
from moetune.measure.operands import LARGEST, TYPES, Operand, OperandMaker
from moetune.measure.reference import grouped_gemm, summed
from moetune.measure.server_kernel import run_server_kernel
from moetune.measure.worker import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moetune.domain.compilation import CompileTask
    from moetune.domain.kernel_format import KernelFormat
    from moetune.domain.problem import Kernel, Problem
    from moetune.measure.alignment import Alignment


class SortedBuffers:
    """Rows in sorted order, padding between them: allocated when they are asked for, as many as are.

    Args:
        problem: whose rows.
        maker: makes activations.
        device: where.
    """

    def __init__(self, problem: Problem, maker: OperandMaker, device: torch.device) -> None:
        self._problem, self._maker, self._device = problem, maker, device
        self._wide: torch.Tensor | None = None
        self._activations: Operand | None = None
        self._narrow: torch.Tensor | None = None

    def wide(self, rows: int) -> torch.Tensor:
        """`[rows, n]` output of the up kernel.

        Raises:
            ConfigError: where there is no room: other configs need none.
        """
        if self._wide is None or self._wide.shape[0] < rows:
            n = self._problem.gemm("up").n
            with _no_room():
                self._wide = torch.empty(rows, n, dtype=self._maker.output, device=self._device)
        return self._wide[:rows]

    def activations(self, rows: int) -> Operand:
        """`[rows, N]` input of the down kernel.

        Raises:
            ConfigError: where there is no room, for what the layer needs beside it neither.
        """
        if self._activations is None or self._activations.values.shape[0] < rows:
            with _no_room():
                self._activations = self._maker.activations(rows, self._problem.N)
                self._narrow = torch.empty(
                    rows, self._problem.N, dtype=self._maker.output, device=self._device
                )
        return self._activations.rows(rows)

    def narrow(self, rows: int) -> torch.Tensor:
        """`[rows, N]` for what is activated in the layer."""
        self.activations(rows)
        assert self._narrow is not None
        return self._narrow[:rows]


@contextmanager
def _no_room() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise ConfigError("the GPU has no room for rows in sorted order, padding between them") from None


class Data:
    """Weights, activations and outputs of one problem on one device.

    Args:
        problem: the problem.
        largest_m: tokens at most.
        copies: of the weights of each kernel.
        kind: how the operands lie in memory.
        device: where.
        seed: of the numbers.
    """

    def __init__(
        self,
        problem: Problem,
        largest_m: int,
        copies: dict[Kernel, int],
        kind: KernelFormat,
        device: torch.device,
        seed: int,
    ) -> None:
        self.problem, self.device = problem, device
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self.maker = OperandMaker(kind, device, self._generator)
        self.output = self.maker.output
        slots = largest_m * problem.topk
        self.weights: dict[Kernel, list[Operand]] = {}
        self.inputs: dict[Kernel, Operand] = {}
        self.outputs: dict[Kernel, torch.Tensor] = {}
        self.biases: dict[Kernel, torch.Tensor | None] = {}
        for kernel in KERNELS:
            gemm = problem.gemm(kernel)
            first = self.maker.weights(problem.E, gemm.n, gemm.k)
            self.weights[kernel] = [first] + [first.copied() for _ in range(copies[kernel] - 1)]
            rows = largest_m if kernel == "up" else slots
            self.inputs[kernel] = self.maker.activations(rows, gemm.k)
            self.outputs[kernel] = torch.empty(slots, gemm.n, dtype=self.output, device=device)
            self.biases[kernel] = self.maker.normal(problem.E, gemm.n, self.output) if problem.bias else None
        self.slot_weights = torch.rand(slots, generator=self._generator, device=device) + 0.1
        self._sorted = SortedBuffers(problem, self.maker, device)

    def output_rows(self, task: CompileTask, m: int, alignment: Alignment) -> torch.Tensor:
        """The rows that a binary writes at m: one for each slot, or token, or in sorted order."""
        if task.launch.sorted_output:
            return self._sorted.wide(alignment.padded_length)
        return self.outputs[task.launch.kernel][: m if task.launch.sum_topk else m * self.problem.topk]

    def clear(self, task: CompileTask, m: int, alignment: Alignment) -> None:
        """Set to zero what a binary adds to; a server does so before each launch of such a kernel."""
        if task.launch.sum_topk:
            self.output_rows(task, m, alignment).zero_()

    def input_rows(self, task: CompileTask, m: int, alignment: Alignment) -> Operand:
        """The activations that a binary reads at m."""
        if task.launch.sorted_input:
            return self._sorted.activations(alignment.padded_length)
        kernel = task.launch.kernel
        return self.inputs[kernel].rows(m if kernel == "up" else m * self.problem.topk)

    def launch(
        self,
        task: CompileTask,
        m: int,
        alignment: Alignment,
        copy: int,
        x: Operand | None = None,
        slot_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Launch a binary at m, after `clear`; the output's rows."""
        kernel, slots = task.launch.kernel, m * self.problem.topk
        given = x or self.input_rows(task, m, alignment)
        weights = self.weights[kernel][copy % len(self.weights[kernel])]
        out = self.output_rows(task, m, alignment)
        routing_weights = self.slot_weights[:slots] if slot_weights is None else slot_weights
        if task.kernel_file is not None:
            run_server_kernel(
                task,
                self.problem,
                given,
                weights,
                out,
                alignment,
                slot_weights=routing_weights,
                bias=self.biases[kernel],
            )
            return out
        if task.grouped:
            assert weights.scales is not None
            run_dequantizing_gemm(
                task.launch,
                given.values,
                weights.values,
                out,
                alignment,
                top_k=task.top_k,
                slot_weights=routing_weights,
                weight_scales=weights.scales,
                weight_zeros=weights.zeros,
                group_size=task.group_size,
            )
            return out
        run_grouped_gemm(
            task.launch,
            given.values,
            weights.values,
            out,
            alignment,
            top_k=task.top_k,
            slot_weights=routing_weights,
            bias=self.biases[kernel],
            x_scales=given.scales,
            weight_scales=weights.scales,
            block_n=task.block_n,
            channel_scales=task.scales is Scales.CHANNEL,
            pdl_early=task.pdl_early,
        )
        return out

    def between(
        self, down: CompileTask, m: int, alignment: Alignment
    ) -> tuple[torch.Tensor, SortedRows | None]:
        """Activate what the up kernel wrote; the result, and which of its rows count where not all do."""
        slots, length, only = m * self.problem.topk, alignment.padded_length, None
        if down.launch.sorted_input:
            wide, narrow = self._sorted.wide(length), self._sorted.narrow(length)
            if down.launch.skips_padding:
                only = SortedRows(alignment, slots, down.launch.config.block_size_m)
        else:
            wide = self.outputs["up"][:slots]
            narrow = torch.empty(slots, self.problem.N, dtype=self.output, device=self.device)
        activate(wide, narrow, gated=self.problem.gated, only=only)
        return narrow, only

    def quantized(self, values: torch.Tensor, only: SortedRows | None = None) -> Operand:
        """Activations in the type of the operands; `only` leaves the other rows out."""
        kind = self.maker.kind
        if kind.scales is not Scales.BLOCK:
            return self.maker.quantized(values)
        rows, columns = values.shape
        group_size, made = kind.block_shape[1], torch.empty_like(values, dtype=TYPES[kind.operand_type])
        scales = torch.empty(rows, -(-columns // group_size), device=self.device)
        quantize(values, made, scales, group_size=group_size, largest=LARGEST[made.dtype], only=only)
        return Operand(made, scales)

    def by_slot(
        self, task: CompileTask, out: torch.Tensor, alignment: Alignment, experts: torch.Tensor
    ) -> torch.Tensor:
        """The rows that a launch wrote, in the order of the slots; zeros for what another rank has."""
        if not task.launch.sorted_output:
            return out
        flat = experts.reshape(-1)
        rows = out[places_of_slots(alignment, flat.numel())]
        return torch.where((flat == ELSEWHERE)[:, None], torch.zeros_like(rows), rows)

    def reference(
        self, task: CompileTask, m: int, experts: torch.Tensor, alignment: Alignment | None = None
    ) -> torch.Tensor:
        """The result of a launch in fp32, made expert by expert: weights are large.

        Args:
            task: what was launched.
            m: at which m.
            experts: expert of each slot.
            alignment: of the slots; where they are read in sorted order it is needed.
        """
        kernel = task.launch.kernel
        flat = experts.reshape(-1)
        places = None
        x = self.inputs[kernel].rows(m if kernel == "up" else flat.numel())
        if task.launch.sorted_input:
            assert alignment is not None
            places = places_of_slots(alignment, flat.numel())
            x = self.input_rows(task, m, alignment)
        weights, bias = self.weights[kernel][0], self.biases[kernel]
        result = torch.zeros(flat.numel(), task.n, device=self.device)
        for expert in flat.unique().tolist():
            if expert == ELSEWHERE:
                continue
            slots = (flat == expert).nonzero().squeeze(1)
            rows = slots // task.top_k if places is None else places[slots]
            result[slots] = grouped_gemm(
                self.maker.meaning_of_activations(x.picked(rows)),
                self.maker.meaning_of_weights(weights.picked(slice(expert, expert + 1))),
                torch.zeros_like(slots),
                1,
                slot_weights=self.slot_weights[slots] if kernel == "down" else None,
                bias=None if bias is None else bias[expert : expert + 1],
            )
        return summed(result, task.launch.sum_topk) if task.launch.sum_topk else result
