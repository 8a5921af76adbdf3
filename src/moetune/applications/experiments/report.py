"""What an experiment found, as values: for the table, for JSON and for a page of Markdown."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moetune import __version__
from moetune.applications.experiments.judging import Judge
from moetune.applications.experiments.known_good import touches_files
from moetune.applications.experiments.pasting import pasteable
from moetune.applications.experiments.redaction import redacted_plan
from moetune.domain.codec import to_json
from moetune.domain.decision import noise_of
from moetune.domain.experiment import Ending, Judgement, StartResult
from moetune.domain.experiment_plan import BASELINE, COMBINED
from moetune.domain.text import printable

if TYPE_CHECKING:
    from pathlib import Path

    from moetune.applications.experiments.record import Facts, Finished
    from moetune.domain.experiment import Comparison
    from moetune.domain.experiment_plan import Intervention, Plan

SCHEMA = "moetune.experiment/1"
_LONGEST = 1 << 16
SHOWN_METRICS: Mapping[str, str] = {
    "output_tokens_per_s": "throughput",
    "ttft_ms": "TTFT",
    "itl_ms": "inter-token",
}
"""Metrics that have a column, and its heading; the others stand in the JSON document."""


@dataclass(frozen=True, slots=True)
class Report:
    """What an experiment found.

    Attributes:
        id: its name.
        folder: of its record and logs.
        plan: without its secrets.
        judgements: of each intervention, in the order of the plan, then of the last arm.
        combined: interventions of the last arm.
        left_out: why interventions that help alone were not in the last arm.
        kept: interventions that stay: those of the last arm, when it helps.
        installs: of the config files that were left in place.
        root: directory of the server's config files; empty where no arm changed any.
        starts: all that are over.
        noise: coefficient of variation between starts of the baseline, None below two.
        proposed: blocks that the smallest effect of the plan needs.
        planned: blocks that the budget allows.
        done: it is over.
        stopped: why it ended early.
        taken_back: what it left in place was taken back since.
    """

    id: str
    folder: Path
    plan: Plan
    judgements: tuple[Judgement, ...]
    combined: tuple[str, ...]
    left_out: tuple[str, ...]
    kept: tuple[str, ...]
    installs: tuple[str, ...]
    root: str
    starts: tuple[Finished, ...]
    noise: float | None
    proposed: int
    planned: int
    done: bool
    stopped: str
    taken_back: bool

    @property
    def helps(self) -> bool:
        """Whether something helped and stands."""
        return self.done and bool(self.kept) and not self.taken_back

    @property
    def kept_interventions(self) -> tuple[Intervention, ...]:
        """What stays."""
        return tuple(map(self.plan.intervention, self.kept))

    @property
    def command(self) -> str:
        """The server's command with the flags that helped, to be pasted; nothing edits a script."""
        return pasteable(self.plan.server, self.kept_interventions)

    @property
    def far_configs(self) -> tuple[str, ...]:
        """Config files that helped and that a person has to install on the server's host."""
        if not self.plan.server.host:
            return ()
        return tuple(path for one in self.kept_interventions for path in one.configs)

    @property
    def flags(self) -> tuple[tuple[str, str], ...]:
        """What of the command changes: `add`, `take out` or `set`, and the words, quoted for a shell."""
        rows = []
        for one in self.kept_interventions:
            variables = [f"{name}={value}" for name, value in one.environment.items()]
            rows += [("take out", shlex.join(one.remove)), ("add", shlex.join(one.arguments))]
            rows.append(("set", shlex.join(variables)))
        return tuple((name, words) for name, words in rows if words)

    @property
    def changes_command(self) -> bool:
        """Whether what helped includes flags or variables."""
        return bool(self.flags)

    def to_json(self) -> dict[str, Any]:
        """The document of `moetune experiment --json`."""
        return {
            "schema": SCHEMA,
            "moetune": __version__,
            "id": self.id,
            "folder": str(self.folder),
            "plan": to_json(self.plan),
            "done": self.done,
            "stopped": self.stopped,
            "taken_back": self.taken_back,
            "noise": self.noise,
            "proposed_blocks": self.proposed,
            "planned_blocks": self.planned,
            "arms": [to_json(one) for one in self.judgements],
            "combined": list(self.combined),
            "left_out": list(self.left_out),
            "kept": {
                "interventions": list(self.kept),
                "installs": list(self.installs),
                "root": self.root,
                "flags": [{"change": name, "words": words} for name, words in self.flags],
                "command": self.command,
            },
            "starts": [to_json(one) for one in self.starts],
        }


def report_of(plan: Plan, name: str, folder: Path, facts: Facts) -> Report:
    """Make the report of a record, also of one that is not complete."""
    plain = redacted_plan(plan)
    baseline = _good(facts.starts, BASELINE)
    known = facts.known_good or {}
    size = facts.size or {}
    return Report(
        id=name,
        folder=folder,
        plan=plain,
        judgements=Judge(plain, facts).all(),
        combined=facts.combined or (),
        left_out=facts.left_out,
        kept=facts.keeping or (),
        installs=facts.kept,
        root=str(known.get("root", "")),
        starts=tuple(facts.starts),
        noise=noise_of(baseline, plan.decision.metric),
        proposed=size.get("proposed", 0),
        planned=size.get("planned", 0),
        done=facts.done,
        stopped=facts.stopped,
        taken_back=facts.taken_back,
    )


def _good(starts: Sequence[Finished], arm: str) -> tuple[StartResult, ...]:
    return tuple(
        one.result
        for one in starts
        if one.result.start.arm == arm and not one.preparing and one.result.ending is Ending.DONE
    )


def arm_rows(report: Report) -> tuple[tuple[str, ...], ...]:
    """Rows of the table: arm, verdict, a ratio with its interval for each shown metric, pairs."""
    return tuple(
        (
            one.arm,
            one.verdict.value,
            *(_ratio(one, metric) for metric in SHOWN_METRICS),
            str(max((comparison.blocks for comparison in one.comparisons), default=0) or "-"),
        )
        for one in report.judgements
    )


HEADINGS = ("arm", "verdict", *SHOWN_METRICS.values(), "pairs")


def _ratio(judgement: Judgement, metric: str) -> str:
    found = next((one for one in judgement.comparisons if one.metric == metric), None)
    return "-" if found is None else ratio_text(found)


def ratio_text(comparison: Comparison) -> str:
    """A ratio with its interval: `1.034 [1.021, 1.047]`."""
    return f"{comparison.ratio:.3f} [{comparison.low:.3f}, {comparison.high:.3f}]"


def arm_details(report: Report, judgement: Judgement) -> tuple[tuple[str, str], ...]:
    """What stands below the table for an arm: names and sentences."""
    validity = judgement.validity
    rows = [("why", problem) for problem in validity.problems]
    rows += [
        ("also changed", f"{one.what}: {one.baseline or 'none'} in the baseline, {one.arm or 'none'} here")
        for one in validity.differences
        if one.declared and not _is_own(report, judgement.arm, one.what)
    ]
    rows += [("evidence", text) for text in validity.evidence if text not in validity.problems]
    others = [
        f"{one.metric} {ratio_text(one)}"
        for one in judgement.comparisons
        if one.metric not in (*SHOWN_METRICS, "requests_per_s")
    ]
    rows += [("others", ", ".join(others))] if others else []
    if judgement.smallest_effect is not None and judgement.verdict.value in ("inconclusive", "equivalent"):
        rows.append(("could be found", f"a change of {judgement.smallest_effect:.1%} with this many starts"))
    rows += [("note", note) for note in judgement.notes]
    return tuple(rows)


def _is_own(report: Report, arm: str, what: str) -> bool:
    """Whether a difference is the intervention itself, which the evidence shows already."""
    names = report.combined if arm == COMBINED else (arm,)
    own = [one for one in report.plan.interventions if one.name in names]
    if what.startswith("config ") and any(map(touches_files, own)):
        return True
    words = [word for one in own for word in (*one.arguments, *one.remove) if word.startswith("-")]
    flags = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in words}
    return what.removeprefix("argument ") in flags


def to_markdown(report: Report) -> str:
    """A page to share."""
    plan, server = report.plan, report.plan.server
    lines = [f"# {_cell(plan.name)}", ""]
    lines += [
        f"{server.name} {server.version}".strip() + f", seed {plan.seed}, {len(report.starts)} starts.",
        "",
    ]
    if report.noise is not None:
        lines += [f"Noise between two starts of the baseline: {report.noise:.1%}.", ""]
    lines += ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in arm_rows(report)]
    lines += ["", "Ratios to the baseline, medians by paired starts, with their intervals.", ""]
    for one in report.judgements:
        details = arm_details(report, one)
        if details:
            lines += [f"## {_cell(one.arm)}", ""]
            lines += [f"- {name}: {_cell(text)}" for name, text in details]
            lines.append("")
    lines += ["## What stays", ""]
    lines += [f"- {_cell(name)}" for name in report.kept] or ["Nothing: no arm helped."]
    lines += [f"- {name}: {_cell(words)}" for name, words in report.flags]
    if report.changes_command:
        lines += ["", "    " + printable(report.command, _LONGEST)]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """A text in a table of Markdown: one line, no markup, no HTML, no end of the cell."""
    text = printable(text, _LONGEST)
    for character, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(character, escaped)
    return "".join(f"\\{c}" if c in "\\`*_[]|#" else c for c in text)


__all__ = [
    "HEADINGS",
    "Report",
    "arm_details",
    "arm_rows",
    "report_of",
    "to_markdown",
]
