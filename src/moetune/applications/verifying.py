"""`moetune verify`: the server's lookup on any machine; on a GPU right numbers, and the time."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from moetune.applications.install_target import read_sources
from moetune.applications.verify_answer import Entry, GpuPart, Verification, Verified, VerifyRequest
from moetune.applications.verify_devices import gpus_for
from moetune.applications.verify_gpu import measure
from moetune.applications.verify_lookup import look_up, pairs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from moetune.applications.compiling import CompilePool
    from moetune.applications.nvml import Device
    from moetune.applications.tuning_measured import Live
    from moetune.applications.worker_pool import WorkerCommand
    from moetune.domain.model import ExpertLayer


def verify(
    request: VerifyRequest,
    environ: Mapping[str, str] | None = None,
    *,
    gpus: Sequence[Device] | None = None,
    command: WorkerCommand | None = None,
    pool: CompilePool | None = None,
    live: Callable[[Live], None] | None = None,
) -> Verification:
    """Verify config files.

    All lookups come first, and every GPU is settled before the first is used: what is refused costs no
    measurement.

    Args:
        request: what is asked.
        environ: the variables of the server; None takes those of this process.
        gpus: the GPUs of this machine; None asks the driver.
        command: how measuring processes are started.
        pool: how is compiled.
        live: called after each measurement.

    Raises:
        MoetuneError: for what cannot be looked at, and a GPU that is the wrong one, busy or lost; what
            was measured is in the journal.
    """
    environ = os.environ if environ is None else environ
    layer = _layer(request)
    looks = [look_up(request, pair, environ, layer) for pair in pairs_of(read_sources(request.paths))]
    chosen = [(looked, gpus_for(request, looked, gpus)) for looked in looks]
    answers = []
    for looked, devices in chosen:
        if isinstance(devices, str):
            entries = tuple(Entry(pick, why=devices) for pick in looked.picks)
            answers.append(Verified(looked, GpuPart(reason=devices), entries))
            continue
        part, entries = measure(request, looked, devices, environ, command=command, pool=pool, live=live)
        answers.append(Verified(looked, part, entries))
    return Verification(tuple(answers))


def _layer(request: VerifyRequest) -> ExpertLayer | None:
    if request.model is None:
        return None
    from moetune.applications.checkpoints import resolve

    return resolve(request.model, offline=request.offline)
