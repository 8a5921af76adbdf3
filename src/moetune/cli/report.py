"""What `plan` and `tune` tell a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetune.cli.output import Prose
from moetune.cli.tables import Column, Table
from moetune.domain.choose import Reason
from moetune.servers.protocol import Applies, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from moetune.applications.measured_answer import MeasuredTuning
    from moetune.applications.output import Written
    from moetune.applications.planning import GpuPlan, Plan, PlannedFile, ServerChoice
    from moetune.applications.predicting import Predicted
    from moetune.applications.tuning import Tuned
    from moetune.cli.output import Sink
    from moetune.domain.choose import Choice
    from moetune.domain.model import ExpertLayer
    from moetune.domain.quantization import Quantization

_FOUND = {
    Outcome.EXACT: "there already: {found}",
    Outcome.STALE: "only for another Triton version, taken with a warning: {found}",
    Outcome.REUSED_UP: "missing: the up kernel's file serves both",
    Outcome.DEFAULT: "missing",
    Outcome.IGNORED: "ignored: in this mode the server opens no file",
    Outcome.CRASH: "missing, and the server dies of {error} while it looks for it",
}
_VERDICTS = {
    Applies.YES: "the Triton fused-MoE kernel: tuned files matter",
    Applies.PARTLY: "{runner}: PARTLY, some calls run the Triton fused-MoE kernel",
    Applies.NO: "{runner}: NOT APPLICABLE, tuned files are not read",
    Applies.UNKNOWN: "UNKNOWN: no rule is known for this case",
}
_GO_ON = "ask again with --runner-backend triton if the server is told so, or with --assume-triton"
_CANNOT_RUN = "cannot run"


def show_plan(sink: Sink, plan: Plan) -> None:
    """The report of a plan: the layer, the server, then each GPU."""
    sink.heading(plan.layer.model)
    sink.fields([*_layer(plan.layer), *_server(plan.server)])
    for part in plan.gpus:
        sink.line()
        sink.heading(f"{part.gpu.torch_name} ({part.gpu.sm or part.gpu.vendor})")
        sink.fields([*_sharded(plan, part), *_runner(part), *_lookups(plan.server, part), *_defaults(part)])
        if part.predicted is None:
            sink.fields(
                [("not tuned", Prose(part.reason)), ("go on", Prose(_GO_ON if not part.applicable else ""))]
            )
        else:
            _show_predicted(sink, part.predicted)


def _layer(layer: ExpertLayer) -> list[tuple[str, str]]:
    inner = f", latent {layer.latent_size}" if layer.latent_size else ""
    shared = f" and {layer.num_shared_experts} shared" if layer.num_shared_experts else ""
    text = (
        f"{layer.num_experts} experts{shared}, topk {layer.topk}, hidden {layer.hidden_size}{inner}, "
        f"intermediate {layer.intermediate_size}{'' if layer.gated else ', not gated'}, "
        f"{quantization_text(layer.quantization)}"
    )
    return [("read from", f"{layer.source}  {layer.architecture}"), ("expert layer", Prose(text))]


def quantization_text(quantization: Quantization) -> str:
    """A quantization in a few words: `fp8_w8a8 in blocks of 128x128`."""
    words = [quantization.dtype.value]
    if quantization.block_shape:
        words.append("in blocks of {}x{}".format(*quantization.block_shape))
    if quantization.group_size:
        words.append(f"in groups of {quantization.group_size}")
    if quantization.per_channel:
        words.append("per channel")
    if quantization.zero_point:
        words.append("with zero points")
    return " ".join(words)


def _server(server: ServerChoice) -> list[tuple[str, str]]:
    fields = [("server", f"{server.name} {server.version}, Triton {server.triton_version}")]
    return fields + [("assumed", text) for text in server.assumed]


def _sharded(plan: Plan, part: GpuPlan) -> Iterator[tuple[str, str]]:
    problem = part.problem
    if problem is None:
        return
    split = plan.parallelism
    sizes = {"tp": split.tp, "ep": split.ep, "dp": split.dp}
    said = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    if split.redundant_experts:
        said.append(f"{split.redundant_experts} redundant experts")
    fused = f" ({problem.fused_shared_experts} of them shared, fused)" if problem.fused_shared_experts else ""
    text = (
        f"{', '.join(said) or 'tp 1'}: E={problem.E}{fused}, N={problem.N}, K={problem.K}, "
        f"topk {problem.topk}, {quantization_text(problem.quantization)}"
    )
    yield "sharded", Prose(text)


def _runner(part: GpuPlan) -> Iterator[tuple[str, str]]:
    runner = part.runner
    yield "runner", Prose(_VERDICTS[runner.applies].format(runner=runner.runner))
    yield "rule", Prose(runner.reason)
    yield "rule read in", Prose(f"{runner.source} ({runner.certainty})" if runner.source else "")
    if runner.applies is not Applies.YES:
        yield "for Triton", Prose(runner.force_triton)
        yield "proof", Prose(runner.evidence)
        if part.applicable and runner.applies is not Applies.PARTLY:
            yield "assumed", Prose("the Triton kernel runs all the same, as --assume-triton says")


def _lookups(server: ServerChoice, part: GpuPlan) -> Iterator[tuple[str, str]]:
    def labelled(file: PlannedFile, text: str) -> str:
        return f"{file.kernel}: {text}" if len(part.files) > 1 else text

    for file in part.files:
        yield "looks for", labelled(file, file.lookup.file_name)
    # The down file is looked for in the same places.
    for file in part.files[:1]:
        for number, path in enumerate(file.lookup.candidates, 1):
            yield "in order", f"{number}. {path.removesuffix(file.lookup.file_name).rstrip('/')}"
    for file in part.files:
        found = _FOUND[file.lookup.outcome].format(found=file.lookup.found, error=file.lookup.error)
        yield "exists", labelled(file, found)
    if part.files and server.shipped != "installed":
        yield "known from", f"the {server.shipped} of {server.name} {server.version}"
    for file in part.files:
        for near in file.nearby:
            yield "near", near.path
            yield "", Prose(f"{near.sibling.confidence} confidence: {near.sibling.reason}")


def _defaults(part: GpuPlan) -> Iterator[tuple[str, str]]:
    last = part.cuda_kernel_until
    if last:
        ms = "m = 1" if last == 1 else f"m from 1 to {last}"
        yield "fallback", Prose(f"{ms}: a CUDA kernel of the server runs there; entries leave its tile to it")
    for regime in part.defaults:
        ms = f"m from {regime.first_m} to {regime.last_m}" if regime.last_m else f"m from {regime.first_m} on"
        if regime.last_m == regime.first_m:
            ms = f"m = {regime.first_m}"
        same = regime.up == regime.down
        yield "fallback", f"{ms}: {regime.up}" if same else f"{ms}: up {regime.up}, down {regime.down}"


def _show_predicted(sink: Sink, predicted: Predicted) -> None:
    sink.line()
    sink.line("  predicted, not measured: microseconds of up and down, weights cold, uniform routing")
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
    yield "configs", "BLOCK_SIZE_M x N x K, g GROUP_SIZE_M, w num_warps, s num_stages"
    yield "limit", "what holds back the slower of the two kernels"
    yield "gain", Prose(_gain_text(predicted))
    yield "known ground", Prose(predicted.familiarity.text)
    if predicted.added_keys:
        keys = ", ".join(map(str, predicted.added_keys))
        yield "keys added", Prose(f"m = {keys}: between the others an entry would lose to the default")
    if predicted.shortfalls:
        ms = ", ".join(str(shortfall.m) for shortfall in predicted.shortfalls)
        yield "shortfall", Prose(f"the default is predicted to be faster at m = {ms}")


def _gain_text(predicted: Predicted) -> str:
    entries = predicted.choices.entries
    gains = [choice.speedup for choice in entries if choice.speedup is not None]
    dead = sum(choice.speedup is None for choice in entries)
    parts = []
    if not predicted.choices.improves:
        parts.append("none predicted: nothing beats the server's default by more than the noise")
    elif gains:
        mean = f", geometric mean {predicted.gain:.2f}x" if predicted.gain is not None else ""
        parts.append(f"predicted {min(gains):.2f}x to {max(gains):.2f}x over the server's default{mean}")
    if dead:
        parts.append(f"at {dead} of {len(entries)} m the server's default cannot run on this GPU")
    return "; ".join(parts)


def show_written(sink: Sink, files: Sequence[Written], kind: str) -> None:
    """The files that were written and what lies beside them.

    Args:
        sink: where it goes.
        files: at least one.
        kind: `predicted` or `measured`.
    """
    sink.heading(f"{kind} files")
    sink.fields((file.state.value, str(file.path)) for file in files)
    for file in files:
        if file.shared_with:
            sink.warning(f"{file.path} also serves another problem: {file.shared_with}")
    sink.fields([("provenance", "beside each, in *.provenance.json")])


def show_use(sink: Sink, tuned: Tuned | MeasuredTuning) -> None:
    """That the server's lookup finds the files, and how to make it read them."""
    if tuned.found:
        sink.fields([("lookup", f"{tuned.plan.server.name}'s own finds them there")])
    sink.line()
    sink.heading("next")
    sink.fields([("use them", tuned.use_command)])
    if tuned.replaces_shipped:
        sink.fields([("beware", Prose("while it is set the server reads none of the files that it ships"))])
