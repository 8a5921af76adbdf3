"""`moetune verify`: the server's lookup on any machine; on a GPU right numbers, and the time."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from moetune.applications.install_target import read_sources
from moetune.applications.verify_answer import Entry, GpuPart, Verification, Verified, VerifyRequest
from moetune.applications.verify_devices import WrongGpuError, gpus_for
from moetune.applications.verify_gpu import measure
from moetune.applications.verify_lookup import look_up, pairs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from moetune.applications.compiling import CompilePool
    from moetune.applications.live import Live
    from moetune.applications.nvml import Device
    from moetune.applications.verify_answer import Looked
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
    looks = [look_up(request, pair, environ, layer) for pair in pairs_of(read_sources(request.files))]
    answers = []
    for looked, devices in zip(looks, _chosen(request, looks, gpus), strict=True):
        if isinstance(devices, str):
            entries = tuple(Entry(pick, why=devices) for pick in looked.picks)
            answers.append(Verified(looked, GpuPart(reason=devices), entries))
            continue
        part, entries = measure(request, looked, devices, environ, command=command, pool=pool, live=live)
        answers.append(Verified(looked, part, entries))
    return Verification(tuple(answers))


def _chosen(
    request: VerifyRequest, looks: Sequence[Looked], gpus: Sequence[Device] | None
) -> list[tuple[Device, ...] | str]:
    """For each pair of files its GPUs, or why it is not measured.

    Files of another GPU are passed over where a directory holds some of this one too.

    Raises:
        WrongGpuError: when the GPUs here are those of none of the files.
        GpuBusyError: when something else computes on them.
    """
    found = [_gpus_or_refusal(request, looked, gpus) for looked in looks]
    refusal = next((one for one in found if isinstance(one, WrongGpuError)), None)
    if refusal is not None and not any(isinstance(one, tuple) for one in found):
        raise refusal
    return [one.message if isinstance(one, WrongGpuError) else one for one in found]


def _gpus_or_refusal(
    request: VerifyRequest, looked: Looked, gpus: Sequence[Device] | None
) -> tuple[Device, ...] | str | WrongGpuError:
    try:
        return gpus_for(request, looked, gpus)
    except WrongGpuError as error:
        return error


def _layer(request: VerifyRequest) -> ExpertLayer | None:
    if request.model is None:
        return None
    from moetune.applications.checkpoints import resolve

    return resolve(request.model, offline=request.offline)
