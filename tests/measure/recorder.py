"""SGLang's own recorder, out of a published wheel: its classes write what the tests read.

Nothing of the wheel is kept; what its module imports is replaced by as little as its classes ask for.
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.wheels import read_member

_MODULE = "sglang/srt/eplb/expert_distribution.py"


class _Torch:
    """Torch without processes and devices."""

    distributed = SimpleNamespace(
        get_rank=lambda: 0, all_reduce=lambda *_, **__: None, ReduceOp=SimpleNamespace(SUM=0)
    )
    cuda = SimpleNamespace(empty_cache=lambda: None)

    @staticmethod
    def get_device_module() -> Any:
        return SimpleNamespace(empty_cache=lambda: None)

    @staticmethod
    def zeros(*sizes: Any, device: object = None, **more: Any) -> torch.Tensor:
        del device  # some releases name the GPU
        return torch.zeros(*sizes, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def recorder(version: str, folder: Path, *, experts: int, layers: int) -> Recorder:
    """The recorder of a release, which writes into a folder."""
    tree = ast.parse(read_member("sglang", version, _MODULE))
    kept: list[ast.stmt] = [
        node
        for node in tree.body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
        or (isinstance(node, ast.Assign) and isinstance(node.value, (ast.Constant, ast.Tuple)))
        or (
            isinstance(node, ast.ImportFrom)
            and node.module in ("__future__", "abc", "contextlib", "collections")
        )
        or (isinstance(node, ast.ImportFrom) and node.module in ("typing", "dataclasses", "pathlib"))
        or (isinstance(node, ast.Import) and node.names[0].name in ("math", "time"))
    ]
    settings = SimpleNamespace(
        chunked_prefill_size=64,
        device="cpu",
        enable_two_batch_overlap=False,
        enable_expert_distribution_metrics=False,
        expert_distribution_recorder_buffer_size=-1,
        eplb_min_rebalancing_utilization_threshold=1.0,
        should_report_expert_balancedness=lambda: False,
    )
    placement = torch.arange(experts).expand(layers, experts).contiguous()
    metadata = SimpleNamespace(
        num_layers=layers,
        num_physical_experts=experts,
        num_logical_experts=experts,
        num_local_physical_experts=experts,
        ep_size=1,
        physical_to_logical_map=placement,
    )
    execution = SimpleNamespace(moe=settings, overlap=settings)
    module = sys.modules["wheel_recorder"] = types.ModuleType("wheel_recorder")  # dataclasses look there
    module.__dict__.update(
        torch=_Torch(),
        logger=SimpleNamespace(info=lambda *_: None, warning=lambda *_: None),
        get_schedule=lambda: settings,
        get_exec=lambda: execution,
        get_device_namespace=lambda: settings,
        get_device=lambda: "cpu",
        reports_expert_balancedness=lambda: False,
        _is_npu=False,
        ServerArgs=object,
        ExpertLocationMetadata=object,
        ForwardBatch=object,
    )
    exec(compile(ast.Module(kept, []), _MODULE, "exec"), module.__dict__)
    module.__dict__["_dump_to_file"] = lambda name, data: torch.save(data, folder / name)
    return Recorder(module, settings, metadata)


class Recorder:
    """A server that records its forward passes.

    Args:
        module: what is left of the wheel's module.
        settings: the server's arguments.
        metadata: the placement of experts.
    """

    def __init__(self, module: types.ModuleType, settings: Any, metadata: Any) -> None:
        self._module, self._settings, self._metadata = module, settings, metadata

    def _make(self, name: str, rank: int) -> Any:
        kind = getattr(self._module, name)
        takes_settings = "server_args" in inspect.signature(_init(kind)).parameters
        arguments = (self._settings, self._metadata, rank) if takes_settings else (self._metadata, rank)
        return kind(*arguments)

    def per_token(self, passes: list[dict[int, torch.Tensor]], rank: int = 0) -> None:
        """Record passes, each the experts of its tokens by layer, and dump them."""
        gatherer = self._make("_DetailSinglePassGatherer", rank)
        accumulator = self._make("_DetailAccumulator", rank)
        for number, layers in enumerate(passes):
            tokens = len(next(iter(layers.values())))
            gatherer.reset()
            gatherer.on_forward_pass_start(
                SimpleNamespace(
                    input_ids=torch.arange(tokens),
                    positions=torch.arange(tokens),
                    extend_seq_lens_cpu=[tokens],
                    forward_mode=SimpleNamespace(value=1),
                )
            )
            for layer, ids in layers.items():
                gatherer.on_select_experts(layer, ids)
            self._append(accumulator, number, gatherer.collect())
        accumulator.dump("file")

    def counts(self, mode: str, passes: list[dict[int, torch.Tensor]], rank: int = 0) -> None:
        """Record passes in mode `per_pass` or `stat`, and dump them."""
        gatherer = self._make("_SelectExpertsSinglePassGatherer", rank)
        accumulator = self._make({"per_pass": "_DetailAccumulator", "stat": "_StatAccumulator"}[mode], rank)
        for number, layers in enumerate(passes):
            gatherer.reset()
            for layer, ids in layers.items():
                gatherer.on_select_experts(layer, ids)
            self._append(accumulator, number, gatherer.collect())
        accumulator.dump("file")

    @staticmethod
    def _append(accumulator: Any, number: int, data: Any) -> None:
        more: tuple[Any, ...] = ({},) if "outputs" in inspect.signature(accumulator.append).parameters else ()
        accumulator.append(number, "primary", data, *more)


def _init(kind: Any) -> Any:
    """The first constructor above a class that names its parameters."""
    for base in kind.__mro__:
        own = base.__dict__.get("__init__")
        if own is not None and "rank" in inspect.signature(own).parameters:
            return own
    raise AssertionError(kind)
