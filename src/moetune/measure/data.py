"""Weights, activations and outputs of one problem on a device, and launches on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moetune.domain.kernel_format import Scales
from moetune.domain.problem import KERNELS
from moetune.measure.alignment import ELSEWHERE
from moetune.measure.dequantizing_kernel import run_dequantizing_gemm
from moetune.measure.kernels import run_grouped_gemm
from moetune.measure.operands import Operand, OperandMaker
from moetune.measure.reference import grouped_gemm, summed
from moetune.measure.server_kernel import run_server_kernel

if TYPE_CHECKING:
    from moetune.domain.compilation import CompileTask
    from moetune.domain.kernel_format import KernelFormat
    from moetune.domain.problem import Kernel, Problem
    from moetune.measure.alignment import Alignment


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

    def output_rows(self, task: CompileTask, m: int) -> torch.Tensor:
        """The rows that a binary writes at m: one for each slot, or for each token."""
        return self.outputs[task.launch.kernel][: m if task.launch.sum_topk else m * self.problem.topk]

    def clear(self, task: CompileTask, m: int) -> None:
        """Set to zero what a binary adds to; a server does so before each launch of such a kernel."""
        if task.launch.sum_topk:
            self.output_rows(task, m).zero_()

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
        given = x or self.inputs[kernel].rows(m if kernel == "up" else slots)
        weights = self.weights[kernel][copy % len(self.weights[kernel])]
        out = self.output_rows(task, m)
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

    def activated(self, m: int) -> torch.Tensor:
        """What stands between the kernels, but for quantization."""
        wide = self.outputs["up"][: m * self.problem.topk]
        if self.problem.gated:
            gate, up = wide.chunk(2, dim=1)
            return torch.nn.functional.silu(gate) * up
        return torch.nn.functional.silu(wide)

    def reference(self, task: CompileTask, m: int, experts: torch.Tensor) -> torch.Tensor:
        """The result of a launch in fp32, made expert by expert: weights are large."""
        kernel = task.launch.kernel
        flat = experts.reshape(-1)
        x = self.inputs[kernel].rows(m if kernel == "up" else flat.numel())
        weights, bias = self.weights[kernel][0], self.biases[kernel]
        result = torch.zeros(flat.numel(), task.n, device=self.device)
        for expert in flat.unique().tolist():
            if expert == ELSEWHERE:
                continue
            slots = (flat == expert).nonzero().squeeze(1)
            rows = slots // task.top_k
            result[slots] = grouped_gemm(
                self.maker.meaning_of_activations(x.picked(rows)),
                self.maker.meaning_of_weights(weights.picked(slice(expert, expert + 1))),
                torch.zeros_like(slots),
                1,
                slot_weights=self.slot_weights[slots] if kernel == "down" else None,
                bias=None if bias is None else bias[expert : expert + 1],
            )
        return summed(result, task.launch.sum_topk) if task.launch.sum_topk else result
