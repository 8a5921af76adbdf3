"""Crashes to findings: the guilty entry or default, and a mend that needs no GPU."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from moetune.applications.doctor_finding import Facts, make_finding, rank_facts
from moetune.applications.doctor_jobs import Job
from moetune.applications.doctor_resources import guilty, lookalike

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moetune.applications.doctor_jobs import Jobs
    from moetune.applications.doctor_records import Crash, ServerFacts, Shape
    from moetune.applications.doctor_solve import Known
    from moetune.domain.findings import Finding
    from moetune.servers.protocol import Server


class CrashJudge:
    """Judges the crashes of one server.

    Args:
        facts: of that server.
        server: its release.
        known: what a person says beside the log.
        jobs: what makes the files.
        config_files: tables that a person named, for the entry that a crash is about.
    """

    def __init__(
        self,
        facts: ServerFacts,
        server: Server,
        known: Known,
        jobs: Jobs,
        config_files: tuple[tuple[str, str], ...],
    ) -> None:
        self._facts, self._server, self._known = facts, server, known
        self._jobs, self._config_files = jobs, config_files

    def finding(self, crash: Crash, shapes: Sequence[Shape]) -> tuple[Finding, Shape | None]:
        """The finding of a crash, and the shape whose missing file explains it."""
        if crash.resources is not None:
            return self._does_not_fit(crash, shapes)
        assert crash.fault is not None
        read = [s for s in shapes if s.outcome in ("found", "stale")]
        shape = read[-1] if read else (shapes[-1] if shapes else None)
        file = (shape.found or shape.name) if shape is not None and shape in read else None
        path = f"{file.directory}/{file.file}" if file is not None else ""
        facts: Facts = (
            ("exception", crash.raised),
            *((("file", path),) if path else ()),
            *rank_facts(crash.ranks),
        )
        if crash.fault.code == "MOE005" and shape is not None:
            facts = (*facts, ("look into", shape.name.directory.rpartition("/")[0]))
        if crash.fault.code == "MOE011" and self._sums_experts():
            facts = (*facts, ("start without", "--enable-fused-moe-sum-all-reduce, or with ep 1"))
        if crash.fault.code == "MOE004":
            directory = crash.sentence.split("the directory ", 1)[-1].split(" does not exist", 1)[0]
            mend = shlex.join(["mkdir", "-p", directory])
        elif shape is not None and self._jobs.of(shape).command:
            mend = self._jobs.of(shape).command
            facts = (*facts, *self._jobs.of(shape).facts)
        elif path:
            mend = shlex.join(["moetune", "lint", path])
        else:
            mend = shlex.join(["moetune", "lint", "--installed"])
        message = f"the server dies of {crash.raised.split(':', 1)[0]}: {crash.sentence}"
        return make_finding(crash.fault.code, message, crash.where, facts=facts, mend=mend), None

    def _does_not_fit(self, crash: Crash, shapes: Sequence[Shape]) -> tuple[Finding, Shape | None]:
        assert crash.resources is not None
        culprit = guilty(crash, shapes, self._server, self._facts, self._known, self._config_files)
        needs = crash.resources
        numbers: Facts = (
            ("needs", f"{needs.required} of {needs.resource}"),
            ("limit", f"{needs.limit} on this GPU"),
            *rank_facts(crash.ranks),
        )
        if culprit is None:
            message = (
                f"a Triton kernel needs {needs.required} of {needs.resource}, {needs.limit} are there, and "
                "nothing shows that it is the fused-MoE kernel"
            )
            alike = lookalike(crash, self._server)
            facts = (*numbers, *((("but", alike),) if alike else ()))
            return make_finding("MOE003", message, crash.where, facts=facts), None
        shape = culprit.shape
        job = self._jobs.of(shape) if shape is not None else Job("", ())
        facts = (*numbers, *culprit.facts, *job.facts)
        if culprit.default:
            message = (
                f"the server's default config for this release does not fit this card: "
                f"{culprit.text} needs {needs.required} bytes of shared memory, {needs.limit} are there; a "
                "file mends it, and no GPU is needed to make one"
            )
            code = "MOE001"
        else:
            message = f"{culprit.text} needs {needs.required} of {needs.resource}, {needs.limit} are there"
            code = "MOE002" if shape is not None else "MOE013"
        mend = job.command or self._jobs.ask_for_model()
        finding = make_finding(
            code, message, crash.where, facts=facts, cost="the server does not run", mend=mend
        )
        return finding, shape if culprit.default else None

    def _sums_experts(self) -> bool:
        """The flag whose kernel wrote out of bounds under expert parallelism (sglang pull request 30485)."""
        start = self._facts.start
        if start is None or start.values.get("enable_fused_moe_sum_all_reduce") != "True":
            return False
        return (start.number("ep_size") or 1) > 1
