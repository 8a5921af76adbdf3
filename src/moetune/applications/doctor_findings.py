"""Facts of logs to findings, worst first, each with the command that mends it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetune.applications.doctor_crashes import CrashJudge
from moetune.applications.doctor_finding import Facts, make_finding, rank_facts
from moetune.applications.doctor_jobs import Job, Jobs
from moetune.applications.doctor_moot import (
    evidence,
    is_partial,
    other_runner,
    runner_by_arguments,
    telling_arguments,
)
from moetune.applications.doctor_solve import release_of
from moetune.domain.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from moetune.applications.doctor_records import LogFacts, ServerFacts, Shape
    from moetune.applications.doctor_solve import Known, VersionGuess
    from moetune.domain.findings import Finding
    from moetune.servers.protocol import Server

_MAX_LISTED = 6


class Judge:
    """Judges what the logs say about one server.

    Args:
        facts: of that server.
        server: its release.
        version: how that release is known.
        known: what a person says beside the log.
        logs: their names, for commands.
        config_files: tables that a person named, for the entry that a crash is about.
    """

    def __init__(
        self,
        facts: ServerFacts,
        server: Server,
        version: VersionGuess,
        known: Known,
        logs: tuple[str, ...],
        config_files: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._facts, self._server, self._version = facts, server, version
        self._known, self._config_files = known, config_files
        self._jobs = Jobs(facts, server, version, known, logs)
        self._crashes = CrashJudge(facts, server, known, self._jobs, config_files)
        self._moot: dict[str, list[Shape]] = {}

    def findings(self) -> Iterator[Finding]:
        """All findings of this server, in no order."""
        facts = self._facts
        shapes = list(facts.shapes.values())
        crashed = set()
        for crash in facts.crashes.values():
            finding, shape = self._crashes.finding(crash, shapes)
            crashed.update([shape.name.shape] if shape is not None else [])
            yield finding
        live = [shape for shape in shapes if self._applies(shape)]
        yield from self._missing([s for s in live if s.name.shape not in crashed])
        yield from self._stale(live)
        yield from self._down([s for s in live if s.name.shape not in crashed], shapes)
        yield from self._pairs(live)
        yield from self._not_applicable(shapes)
        yield from self._starts()

    # --- does a file matter at all? -----------------------------------------------------------------

    def _applies(self, shape: Shape) -> bool:
        reason = self._facts.ignored or other_runner(self._facts, shape.name.dtype)
        if reason:
            self._moot.setdefault(reason, []).append(shape)
        return not reason

    def _not_applicable(self, shapes: Sequence[Shape]) -> Iterator[Finding]:
        facts = self._facts
        for reason, moot in sorted(self._moot.items()):
            files: Facts = tuple(("file", shape.name.file) for shape in _first_of_each(moot))
            if reason == facts.ignored:
                yield self._ignored(files, moot[0].where)
                continue
            said = evidence(facts, reason)
            extra: list[tuple[str, str]] = [("said by", said)] if said else []
            if is_partial(reason):
                extra.append(("partly", "calls with few tokens may still run the Triton kernel"))
            message = (
                f"NOT APPLICABLE: the runner {printable(reason, 60)} computes these experts and reads no "
                "tuned file; the warning is moot and nothing is to be tuned"
            )
            yield make_finding("MOE030", message, moot[0].where, facts=(*files, *extra))
        if not shapes:
            yield from self._without_lookup()

    def _ignored(self, files: Facts = (), where: str = "") -> Finding:
        message = (
            f"NOT APPLICABLE: {self._facts.ignored} is on, so the server opens no tuned file; nothing is to "
            "be tuned"
        )
        return make_finding("MOE031", message, where, facts=files)

    def _without_lookup(self) -> Iterator[Finding]:
        facts = self._facts
        others = [runner for runner in facts.runners.values() if not runner.reads_file]
        by_arguments = runner_by_arguments(facts)
        if facts.ignored:
            yield self._ignored()
        elif others and len(others) == len(facts.runners):
            names = ", ".join(dict.fromkeys(printable(runner.runner, 40) for runner in others))
            message = f"NOT APPLICABLE: {names} computes the experts and reads no tuned file: nothing to tune"
            texts: Facts = tuple(("said by", runner.text) for runner in others[:_MAX_LISTED] if runner.text)
            yield make_finding("MOE030", message, facts=texts)
        elif by_arguments:
            message = (
                f"NOT APPLICABLE: by its arguments {by_arguments} computes the experts and reads no tuned "
                "file: nothing to tune"
            )
            yield make_finding("MOE030", message, facts=telling_arguments(facts))
        elif not facts.crashes:
            message = (
                "no line of the log speaks of a tuned file: the Triton fused-MoE kernel did not run as far "
                "as the log goes"
            )
            yield make_finding("MOE033", message)

    # --- files --------------------------------------------------------------------------------------

    def _missing(self, live: Sequence[Shape]) -> Iterator[Finding]:
        """One finding for each shape that runs with the default; its down file belongs to it."""
        for shape in live:
            if shape.outcome != "missing":
                continue
            if shape.name.kernel == "down" and self._without_up(shape, live):
                continue
            if shape.name.kernel == "down":
                continue  # the up file is there: see `_down`
            job = self._jobs.of(shape)
            down = [s for s in live if s.name.kernel == "down" and s.name.shape == shape.name.shape]
            places = tuple(("looked in", place.directory) for place in shape.places if place.directory)
            yield make_finding(
                "MOE020",
                f"no tuned file for {_shape_text(shape)}: the server runs its default config",
                shape.where,
                facts=(
                    ("file", shape.name.file),
                    *(("file", s.name.file) for s in down[:1]),
                    *places,
                    *rank_facts(shape.ranks),
                    *job.facts,
                ),
                cost="every call of the experts, in prefill and decode; the command says how much",
                mend=job.command,
            )

    @staticmethod
    def _without_up(down: Shape, live: Sequence[Shape]) -> bool:
        return any(
            s.name.kernel == "up" and s.outcome == "missing" and s.name.shape == down.name.shape for s in live
        )

    def _stale(self, live: Sequence[Shape]) -> Iterator[Finding]:
        """One finding for all files of another Triton: an upgrade makes all of them stale at once."""
        stale = [shape for shape in live if shape.outcome == "stale" and shape.found is not None]
        if not stale:
            return
        running = stale[0].name.triton
        jobs = {shape.name.shape: self._jobs.of(shape) for shape in stale}
        commands = list(dict.fromkeys(job.command for job in jobs.values() if job.command))
        found = sorted({s.found.triton for s in stale if s.found is not None})
        what = _shape_text(stale[0]) if len(jobs) == 1 else f"{len(jobs)} shapes"
        kernels = sorted({s.name.kernel for s in stale}, reverse=True)
        files = tuple(
            ("file", f"{s.name.file} from triton_{s.found.triton.replace('.', '_')}")
            for s in stale[: 2 * _MAX_LISTED]
            if s.found is not None
        )
        current = any(s.outcome == "found" for s in live)
        all_of_them = () if current else (("all files", self._jobs.borrow_installed(stale[0])),)
        yield make_finding(
            "MOE021",
            f"{' and '.join(kernels)}: stale: the file{'s' if len(stale) > 1 else ''} for {what} "
            f"{'were' if len(stale) > 1 else 'was'} tuned for Triton {', '.join(found)}, and Triton "
            f"{running} runs",
            stale[0].where,
            facts=(
                *files,
                *rank_facts(stale[0].ranks),
                *_unique(f for job in jobs.values() for f in job.facts),
                *all_of_them,
            ),
            cost="unknown: what is best, and what fits, changes with the compiler",
            mend="\n".join(commands),
        )

    def _down(self, live: Sequence[Shape], shapes: Sequence[Shape]) -> Iterator[Finding]:
        for shape in live:
            missing = shape.outcome in ("missing", "reused up") and shape.name.kernel == "down"
            if not missing or self._without_up(shape, shapes):
                continue
            job = self._jobs.of(shape)
            how = (
                "the up kernel's entry"
                if shape.outcome == "reused up"
                else "the up kernel's entry or the default"
            )
            yield make_finding(
                "MOE022",
                f"down: missing: the down kernel of {_shape_text(shape)} has no file and runs with {how}",
                shape.where,
                facts=(
                    ("file", shape.name.file),
                    ("directory", shape.name.directory.rpartition("/")[2]),
                    *rank_facts(shape.ranks),
                    *job.facts,
                ),
                cost="up to 29% of both kernels was seen where one config served both",
                mend=job.command,
            )

    def _pairs(self, live: Sequence[Shape]) -> Iterator[Finding]:
        facts = self._facts
        shape = live[-1] if live else None
        job = self._jobs.of(shape) if shape is not None else Job("", ())
        if facts.overrides:
            listed = tuple(
                ("m", f"{m}: down {down}, up {up}")
                for down, up, m in sorted(facts.overrides, key=lambda o: o[2])[:_MAX_LISTED]
            )
            yield make_finding(
                "MOE023",
                f"BLOCK_SIZE_M of the down file is overridden at {len(facts.overrides)} number"
                f"{'s' if len(facts.overrides) > 1 else ''} of tokens: the two files were not made together",
                next(iter(facts.overrides.values())),
                facts=(*listed, *job.facts),
                cost="the down kernel runs with a config that nobody timed",
                mend=job.command,
            )
        reused = [s for s in live if s.name.kernel == "down" and s.outcome == "reused up"]
        version = release_of(self._version.version)
        if "up" in facts.tma and reused and (0, 5, 18) <= version <= (0, 5, 23):
            job = self._jobs.of(reused[0])
            yield make_finding(
                "MOE024",
                "the up file has USE_TMA and there is no down file: the copy that the down kernel gets keeps "
                "USE_TMA, although the log says that it does not",
                facts.tma["up"],
                facts=(("file", reused[0].name.file), *job.facts),
                mend=job.command,
            )

    # --- starts -------------------------------------------------------------------------------------

    def _starts(self) -> Iterator[Finding]:
        facts = self._facts
        refused = facts.fusion.get("refused", "")
        if "requires SM90" in refused:
            yield make_finding(
                "MOE012",
                f"the server dies: {refused}",
                facts=(
                    ("said by", refused),
                    ("start with", "--enforce-disable-flashinfer-allreduce-fusion"),
                ),
            )
        elif refused:
            asked = facts.fusion.get("asked", "") or "by a flag or by default"
            yield make_finding(
                "MOE035",
                f"all-reduce fusion was asked for and refused: {refused}",
                facts=(("asked", asked),),
                cost="the all-reduce and the norm run as kernels of their own",
            )
        for phase, reason in sorted(facts.graphs_off.items()):
            yield make_finding("MOE036", f"{phase} runs without CUDA graphs, or with less of them: {reason}")
        kinds = {
            (s.text("model_path", "model", "model_tag"), s.text("tp_size", "tensor_parallel_size"))
            for s in facts.starts
        }
        if len(kinds) > 1:
            listed = tuple(
                ("start", f"{s.where}: {printable(s.text('model_path', 'model'), 80)}")
                for s in facts.starts[:_MAX_LISTED]
            )
            yield make_finding(
                "MOE041", f"the log holds {len(facts.starts)} starts that differ", facts=listed
            )


def log_findings(facts: LogFacts) -> Iterator[Finding]:
    """Findings about the logs as such, and those that belong to no server."""
    looked_up = any(server.shapes for server in facts.servers.values())
    if facts.dense and not looked_up:
        where = next(iter(facts.dense.values()))
        plural = "s" if len(facts.dense) > 1 else ""
        yield make_finding(
            "MOE032",
            f"{len(facts.dense)} missing file{plural} of the dense block-wise GEMM and none of the fused-MoE "
            "kernel: moetune does not make these",
            where,
            facts=tuple(("file", name) for name in list(facts.dense)[:_MAX_LISTED]),
        )
    for crash in facts.orphans.values():
        if crash.resources is not None:
            needs = crash.resources
            yield make_finding(
                "MOE003",
                f"a Triton kernel needs {needs.required} of {needs.resource} and {needs.limit} are there; "
                "the log does not show which server and which kernel",
                crash.where,
            )
    for source in facts.sources:
        for problem in source.problems:
            yield make_finding(
                "MOE040",
                f"{printable(source.name, 200)} was not read to its end: {problem}",
                f"{printable(source.name, 200)}:{source.lines}",
            )


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sorted by severity, then code, then place."""
    return tuple(sorted(findings, key=lambda f: (f.code.severity.rank, f.code.code, f.message, f.where)))


def _shape_text(shape: Shape) -> str:
    name = shape.name
    parts = [f"E={name.E}, N={name.N}", name.dtype or "bf16"]
    parts += [f"block {name.block_shape[0]}x{name.block_shape[1]}"] if name.block_shape else []
    parts += ["per channel"] if name.per_channel else []
    return f"{', '.join(parts)} on {printable(name.device.replace('_', ' '), 80) or 'an unnamed device'}"


def _first_of_each(shapes: Sequence[Shape]) -> list[Shape]:
    return list({shape.name.file: shape for shape in shapes}.values())[:_MAX_LISTED]


def _unique(facts: Iterable[tuple[str, str]]) -> Facts:
    return tuple(dict.fromkeys(facts))
