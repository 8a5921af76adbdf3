"""The command that mends a finding, ready to paste."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moetune.domain.errors import MoetuneError
from moetune.domain.keys import LARGEST_M, MAX_OWN_KEYS, STANDARD_KEYS
from moetune.domain.problem import Parallelism
from moetune.servers.protocol import Applies, ServerOptions
from moetune.servers.registry import open_server

if TYPE_CHECKING:
    from moetune.applications.doctor_records import ServerFacts, Start
    from moetune.applications.doctor_solve import Fit, ModelGuess, VersionGuess
    from moetune.domain.gpu import Gpu
    from moetune.domain.model import ExpertLayer
    from moetune.servers.log_events import ConfigName
    from moetune.servers.protocol import Server

_ASSUMED_CHUNK = 8192


@dataclass(frozen=True, slots=True)
class Batches:
    """The numbers of tokens that a server's kernel really meets.

    Attributes:
        ms: keys for `--m`, none where the log shows no graphs.
        largest: the prefill chunk, None where the log does not tell.
        decode: captured decode batches, in tokens.
        prefill: captured prefill lengths.
    """

    ms: tuple[int, ...] = ()
    largest: int | None = None
    decode: tuple[int, ...] = ()
    prefill: tuple[int, ...] = ()

    @property
    def options(self) -> list[str]:
        """For the command line."""
        words = ["--m", ",".join(map(str, self.ms))] if self.ms else []
        if self.largest is not None and self.largest != _ASSUMED_CHUNK:
            words += ["--max-m", str(self.largest)]
        return words


def batches_of(facts: ServerFacts) -> Batches:
    """What the graphs of a server are captured for, and standard keys from there to the prefill chunk."""
    chunk = facts.limits.get("prefill_chunk", 0)
    if chunk <= 0 and facts.start is not None:
        chunk = facts.start.number("chunked_prefill_size", "max_num_batched_tokens") or 0
    largest = chunk if 0 < chunk <= LARGEST_M else None
    decode = _tokens(facts, "decode")
    prefill = _tokens(facts, "prefill")
    captured = {m for m in (*decode, *prefill) if 1 <= m <= (largest or LARGEST_M)}
    if not captured:
        return Batches((), largest, decode, prefill)
    last = largest or max(_ASSUMED_CHUNK, *captured)
    standard = (*STANDARD_KEYS, *(STANDARD_KEYS[-1] << n for n in range(1, 9)))
    # Between captured sizes no other is met; beyond them prefill meets every one.
    rest = {m for m in standard if max(captured) < m <= last}
    if not decode:
        rest |= {m for m in STANDARD_KEYS if m <= min(512, last)}
    return Batches(_thinned(sorted(captured | rest | {last})), largest, decode, prefill)


def _tokens(facts: ServerFacts, phase: str) -> tuple[int, ...]:
    sizes = facts.graphs.get(phase)
    if sizes is None or (phase in facts.graphs_off and phase == "decode"):
        return ()
    each = max(sizes.tokens_per_request, 1) if phase == "decode" else 1
    return tuple(sorted({size * each for size in sizes.sizes if 0 < size * each <= LARGEST_M}))


def _thinned(ms: list[int]) -> tuple[int, ...]:
    """At most as many keys as `--m` takes: the largest lie closest to each other, relatively."""
    while len(ms) > MAX_OWN_KEYS:
        half = len(ms) // 2
        ms = ms[:half] + ms[half:-1:2] + ms[-1:]
    return tuple(ms)


def tune_command(
    model: str,
    fit: Fit,
    server: Server,
    server_options: list[str],
    gpu: Gpu,
    facts: ServerFacts,
    layer: ExpertLayer | None,
) -> str:
    """`moetune tune` for one looked-up file; needs no GPU."""
    words = ["moetune", "tune", model, "--tp", str(fit.tp)]
    for flag, size in (("--ep", fit.ep), ("--dp", fit.dp)):
        words += [flag, str(size)] if size > 1 else []
    start = facts.start
    redundant = start.number("ep_num_redundant_experts") if start is not None else None
    words += ["--redundant-experts", str(redundant)] if redundant else []
    words += ["--quant", fit.quant] if fit.quant else []
    words += server_options
    words += ["--disable-shared-experts-fusion"] if fit.unfused else []
    words += _runner_words(layer, fit, server, gpu, start)
    return shlex.join([*words, *batches_of(facts).options, "--effort", "predict"])


def by_hand_command(
    name: ConfigName,
    layer: ExpertLayer,
    quant: str,
    server_options: list[str],
    facts: ServerFacts,
) -> str:
    """`moetune tune` with the numbers of the file, where no split of the model gives it."""
    packed = facts.name == "sglang" and name.dtype == "int4_w4a16"
    words = ["moetune", "tune", "--experts", str(name.E), "--topk", str(layer.topk)]
    words += ["--hidden", str(layer.latent_size or layer.hidden_size)]
    words += ["--intermediate", str(2 * name.N if packed else name.N)]
    words += ["--no-gated"] if not layer.gated else []
    words += ["--quant", quant] if quant else []
    words += server_options
    return shlex.join([*words, "--assume-triton", *batches_of(facts).options, "--effort", "predict"])


def argument_command(model: str, server_options: list[str], facts: ServerFacts, quant: str) -> str:
    """`moetune tune` by the server's own arguments, for a model that is not packaged."""
    start = facts.start
    words = ["moetune", "tune", model]
    tp = (start.number("tp_size", "tensor_parallel_size") if start is not None else None) or 1
    ep = (start.number("ep_size") if start is not None else None) or 1
    if start is not None and start.values.get("enable_expert_parallel") == "True":
        ep = 2
    dp = start.number("data_parallel_size") if start is not None else None
    words += ["--tp", str(tp)]
    words += ["--ep", str(ep)] if ep > 1 else []
    words += ["--dp", str(dp)] if dp and dp > 1 else []
    words += ["--quant", quant] if quant else []
    words += server_options
    if start is not None and start.values.get("disable_shared_experts_fusion") == "True":
        words.append("--disable-shared-experts-fusion")
    return shlex.join([*words, "--assume-triton", *batches_of(facts).options, "--effort", "predict"])


def server_words(
    server: Server, version: VersionGuess, gpu: Gpu, compute_capability: str | None
) -> list[str]:
    """Server, release, Triton where it is not the pinned one, GPU."""
    words = ["--server", server.name, "--server-version", version.version]
    if open_server(server.name, version.version).triton_version != server.triton_version:
        words += ["--triton-version", server.triton_version]
    words += ["--gpu", gpu.torch_name]
    return words + (["--compute-capability", compute_capability] if compute_capability else [])


def _runner_words(
    layer: ExpertLayer | None, fit: Fit, server: Server, gpu: Gpu, start: Start | None
) -> list[str]:
    """What makes `tune` agree that the Triton kernel runs: the log shows that it does."""
    backend = start.text("moe_runner_backend", "moe_backend") if start is not None else ""
    words = ["--runner-backend", backend] if backend.lower() == "triton" else []
    if layer is None:
        return [*words, "--assume-triton"]
    options = ServerOptions(
        moe_runner_backend=backend.lower() or "auto", disable_shared_experts_fusion=fit.unfused
    )
    try:
        verdict = server.runner(layer, Parallelism(fit.tp, fit.ep, fit.dp), gpu, options)
    except MoetuneError:
        return [*words, "--assume-triton"]
    known = verdict.applies in (Applies.YES, Applies.PARTLY)
    return words if known else [*words, "--assume-triton"]


def with_model_command(logs: tuple[str, ...], model: ModelGuess) -> str:
    """`moetune doctor` once more, with the model named."""
    return shlex.join(["moetune", "doctor", *logs, "--model", model.name or "MODEL"])
