"""The files of measured tables, with what was checked of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetune.applications.output import TableFile
from moetune.applications.provenance import Check, Conditions, Kind, Provenance
from moetune.applications.routing_store import UNIFORM
from moetune.domain.problem import KERNELS
from moetune.servers.other_kernel import with_own_entries

if TYPE_CHECKING:
    from moetune.applications.planning import GpuPlan, Plan
    from moetune.applications.tuning_loop import Measured
    from moetune.domain.config import ConfigTable
    from moetune.domain.problem import Kernel
    from moetune.measure.protocol import DeviceFacts
    from moetune.servers.protocol import Server

_REPEATS = 5  # least samples behind a time; see protocol.TimeTask


def measured_tables(
    server: Server, plan: Plan, part: GpuPlan, measured: Measured, facts: DeviceFacts | None
) -> list[TableFile]:
    """The files of measured tables, up first.

    Args:
        server: that will read them.
        plan: names the model.
        part: of the plan, for the GPU that was measured.
        measured: the tables.
        facts: what measured; None where nothing had to be.
    """
    problem, choices = part.problem, measured.choices
    assert problem is not None
    tables: dict[Kernel, ConfigTable] = {"up": choices.up}
    if choices.down is not None:
        tables["down"] = choices.down
    return [
        TableFile(
            path=server.file_path(problem, kernel),
            text=server.render_table(problem, with_own_entries(server, problem, table), kernel),
            provenance=Provenance(
                kind=Kind.MEASURED,
                kernels=KERNELS if choices.down is None else (kernel,),
                problem=problem,
                choices=choices,
                conditions=Conditions(measured.noise, repeats=_REPEATS, spread=measured.spread),
                model=plan.layer.model,
                checks=_checks(
                    measured,
                    kernel if choices.down is not None else None,
                    server.triton_version,
                    facts,
                    problem.routing,
                ),
                added_keys=measured.added_keys,
                shortfalls=measured.shortfalls,
            ),
        )
        for kernel, table in tables.items()
    ]


def _checks(
    measured: Measured, kernel: Kernel | None, triton: str, facts: DeviceFacts | None, routing: str
) -> tuple[Check, ...]:
    numerics = [item for item in measured.numerics if kernel is None or item.kernel == kernel]
    worst = max((item.relative_error for item in numerics), default=None)
    layers = [layer for layer in measured.layers.values() if layer.uniform_ratio is not None]
    routings = "uniform and skewed" if routing == UNIFORM else f"{routing} and uniform"
    return (
        Check(
            "matches the fp32 reference",
            bool(numerics),
            f"{len(numerics)} configs, relative error at most {worst:.2g}" if worst is not None else "",
        ),
        Check(
            f"not slower through the whole layer, {routings} routing",
            bool(layers) or None,
            f"{len(layers)} m, interleaved with the default",
        ),
        Check(
            "measured with the Triton of the server",
            None if facts is None else facts.triton.startswith(triton),
            "" if facts is None else f"Triton {facts.triton}, the server's is {triton}",
        ),
        Check("weights cold", True, "three times the L2 touched between two uses of the same weights"),
        Check(
            "nothing compiled while measuring",
            measured.compilations == 0,
            f"{measured.compilations} kernels compiled by the measuring processes",
        ),
    )
