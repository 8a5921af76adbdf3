"""What `plan` and `tune` tell a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetune.cli.tables import Column, Table
from moetune.domain.choose import Reason
from moetune.servers.protocol import Applies, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moetune.applications.planning import GpuPlan, Plan, PlannedFile, ServerChoice
    from moetune.applications.predicting import Predicted
    from moetune.cli.output import Sink
    from moetune.domain.choose import Choice
    from moetune.domain.model import ExpertLayer
    from moetune.domain.problem import Problem
    from moetune.domain.quantization import Quantization

_FOUND = {
    Outcome.EXACT: "there: {found}",
    Outcome.STALE: "only of another Triton version, which the server takes with a warning: {found}",
    Outcome.REUSED_UP: "missing: the up kernel's file serves both",
    Outcome.DEFAULT: "missing: the server takes its built-in default",
    Outcome.IGNORED: "ignored: with deterministic inference the server opens no file",
    Outcome.CRASH: "missing, and the server dies while it looks for it: {error}",
}
_CANNOT_RUN = "cannot run"


def show_plan(sink: Sink, plan: Plan) -> None:
    """The report of a plan: the layer, the server, then each GPU."""
    sink.heading(f"{plan.layer.model} ({plan.layer.source})")
    sink.fields(_layer(plan.layer))
    sink.fields(_server(plan.server))
    for part in plan.gpus:
        sink.line()
        _show_gpu(sink, plan, part)


def _layer(layer: ExpertLayer) -> list[tuple[str, str]]:
    inner = f", latent {layer.latent_size}" if layer.latent_size else ""
    shared = f", {layer.num_shared_experts} shared" if layer.num_shared_experts else ""
    text = (
        f"{layer.num_experts} experts{shared}, topk {layer.topk}, hidden {layer.hidden_size}{inner}, "
        f"intermediate {layer.intermediate_size}{'' if layer.gated else ', not gated'}, "
        f"{quantization_text(layer.quantization)}"
    )
    return [("architecture", layer.architecture), ("expert layer", text)]


def quantization_text(quantization: Quantization) -> str:
    """A quantization in a few words: `fp8_w8a8 in blocks of 128x128`."""
    words = [quantization.dtype.value]
    if quantization.block_shape:
        words.append("in blocks of {}x{}".format(*quantization.block_shape))
    if quantization.group_size:
        words.append(f"in groups of {quantization.group_size}")
    if quantization.per_channel:
        words.append("per channel")
    return " ".join(words)


def _server(server: ServerChoice) -> list[tuple[str, str]]:
    fields = [("server", f"{server.name} {server.version}, Triton {server.triton_version}")]
    return fields + [("assumed", text) for text in server.assumed]


def _show_gpu(sink: Sink, plan: Plan, part: GpuPlan) -> None:
    sink.heading(f"{part.gpu.torch_name} ({part.gpu.sm or part.gpu.vendor})")
    if part.problem is not None:
        sink.fields([("sharded", _sharded(plan, part.problem))])
    sink.fields(_runner(part))
    sink.fields(list(_lookups(plan.server, part)))
    if part.predicted is not None:
        _show_predicted(sink, plan, part.predicted)
    else:
        sink.line(f"  nothing to tune: {part.reason}")


def _sharded(plan: Plan, problem: Problem) -> str:
    split = plan.parallelism
    sizes = {"tp": split.tp, "ep": split.ep, "dp": split.dp, "redundant experts": split.redundant_experts}
    said = [f"{name} {size}" for name, size in sizes.items() if size > (name != "redundant experts")]
    fused = f" ({problem.fused_shared_experts} shared fused)" if problem.fused_shared_experts else ""
    return (
        f"{', '.join(said) or 'one GPU'}: E={problem.E}{fused}, N={problem.N}, K={problem.K}, "
        f"topk {problem.topk}, {quantization_text(problem.quantization)}"
    )


def _runner(part: GpuPlan) -> Iterator[tuple[str, str]]:
    runner = part.runner
    verdict = {
        Applies.YES: "the Triton fused-MoE kernel: tuned files matter",
        Applies.PARTLY: f"{runner.runner}, PARTLY: some calls run the Triton fused-MoE kernel",
        Applies.NO: f"{runner.runner}: NOT APPLICABLE, tuned files are never read",
        Applies.UNKNOWN: "UNKNOWN: no rule covers this case",
    }[runner.applies]
    yield "runner", verdict
    yield "rule", runner.reason
    yield "read in", f"{runner.source} ({runner.certainty})" if runner.source else ""
    if runner.applies is not Applies.YES:
        yield "for Triton", runner.force_triton
        yield "proof", runner.evidence
        if part.applicable:
            yield "assumed", "the Triton kernel, as --assume-triton says"


def _lookups(server: ServerChoice, part: GpuPlan) -> Iterator[tuple[str, str]]:
    def labelled(file: PlannedFile, text: str) -> str:
        return f"{file.kernel}: {text}" if len(part.files) > 1 else text

    for file in part.files:
        yield "looks for", labelled(file, file.lookup.file_name)
    yield from _places(part)
    for file in part.files:
        found = _FOUND[file.lookup.outcome].format(found=file.lookup.found, error=file.lookup.error)
        yield "now", labelled(file, found)
    if part.files and server.shipped != "installed":
        yield "known from", f"{server.shipped} of {server.name} {server.version}"
    for file in part.files:
        yield from _nearby(file)


def _places(part: GpuPlan) -> Iterator[tuple[str, str]]:
    """The directories in which the up file is looked for, in order; the others are looked for there too."""
    if part.files:
        lookup = part.files[0].lookup
        for number, path in enumerate(lookup.candidates, 1):
            yield "in order", f"{number}. {path.removesuffix(lookup.file_name).rstrip('/')}"


def _nearby(file: PlannedFile) -> Iterator[tuple[str, str]]:
    for near in file.nearby:
        yield "near", f"{near.path} ({near.sibling.confidence}: {near.sibling.reason})"


def _show_predicted(sink: Sink, plan: Plan, predicted: Predicted) -> None:
    del plan
    sink.line()
    sink.line("  predicted: cold weights, uniform routing; m is tokens in one call")
    sink.table(predicted_table(predicted))
    sink.fields(_summary(predicted))


def predicted_table(predicted: Predicted) -> Table:
    """M to configs, predicted time, gain, and what limits the slower kernel."""
    configs = ("up and down",) if predicted.choices.one_file else ("up", "down")
    columns = (
        Column("m", right=True),
        *(Column(heading) for heading in configs),
        Column("us", right=True),
        Column("gain", right=True),
        Column("limit"),
    )
    return Table(columns, tuple(_row(predicted, choice) for choice in predicted.choices.entries))


def _row(predicted: Predicted, choice: Choice) -> tuple[str, ...]:
    up, down = predicted.limits[choice.m]
    pair = (choice.pair.up,) if predicted.choices.one_file else (choice.pair.up, choice.pair.down)
    limit = up if choice.up_us >= choice.down_us else down
    return (str(choice.m), *map(str, pair), f"{choice.time_us:.1f}", _gain(choice), limit)


def _gain(choice: Choice) -> str:
    if choice.speedup is None:
        return _CANNOT_RUN
    return "default" if choice.reason is Reason.DEFAULT_KEPT else f"{choice.speedup:.2f}x"


def _summary(predicted: Predicted) -> Iterator[tuple[str, str]]:
    yield "config", "BLOCK_SIZE_M x N x K, g GROUP_SIZE_M, w num_warps, s num_stages"
    yield "us", "up and down together; limit: what holds back the slower of the two"
    yield "gain", _gain_text(predicted)
    yield "known ground", predicted.familiarity.text
    if predicted.added_keys:
        keys = ", ".join(map(str, predicted.added_keys))
        yield "keys added", f"{keys}: between the others an entry would have lost to the default"
    if predicted.shortfalls:
        ms = ", ".join(str(shortfall.m) for shortfall in predicted.shortfalls)
        yield "shortfall", f"the default is predicted to be faster at m = {ms}"


def _gain_text(predicted: Predicted) -> str:
    entries = predicted.choices.entries
    gains = [choice.speedup for choice in entries if choice.speedup is not None]
    dead = sum(choice.speedup is None for choice in entries)
    parts = []
    if not predicted.choices.improves:
        parts.append("none predicted: the server's default is already best")
    elif gains:
        mean = predicted.gain
        parts.append(f"predicted {min(gains):.2f}x to {max(gains):.2f}x over the server's default")
        parts.append(f"geometric mean {mean:.2f}x" if mean is not None else "")
    if dead:
        parts.append(f"at {dead} of {len(entries)} m the default needs more than this GPU has and cannot run")
    return "; ".join(filter(None, parts))
