"""Whether an arm can be compared with the baseline: nothing else differs, and it was really active.

Numbers are looked at by nobody here. Two questions are asked of what the starts ran:

1. Does the arm differ from the baseline in anything but its interventions and the consequences that the
   table of flags or the plan declares? Then it is INVALID, and the problem names the fact and both values.
2. Was each intervention seen to be active? A config file counts when the lookup ended with that very
   file; a flag when its line stands in the log, or, where the server prints none, when it stands among the
   resolved arguments. A line that refuses it says that it cannot be activated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moetune.applications.experiments.config_proof import config_names, prove_configs
from moetune.applications.experiments.differences import UNKNOWN, differences, disagreements
from moetune.applications.experiments.own_arguments import own_names, own_values
from moetune.domain.experiment import Difference, Proof, ServerFacts, Validity
from moetune.domain.text import printable
from moetune.servers.flags import ProofRule, proofs_of

if TYPE_CHECKING:
    from moetune.domain.experiment_plan import Intervention


__all__ = ["ProofRule", "check_arm", "texts_to_look_for"]

# What a server sizes by the memory that it finds free, and the flag that fixes it.
_KEPT_EQUAL_BY = {
    ("sglang", "kv_tokens"): "--max-total-tokens",
    ("sglang", "max_running_requests"): "--max-running-requests",
    ("vllm", "kv_tokens"): "--num-gpu-blocks-override",
    ("vllm", "max_running_requests"): "--max-num-seqs",
}
_WORST_FIRST = (Proof.REFUSED, Proof.NOT_SEEN, Proof.NO_LINE, Proof.ACTIVE)


@dataclass(slots=True)
class _Case:
    """What is found about one arm."""

    differences: list[Difference] = field(default_factory=list)
    proofs: list[Proof] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def result(self) -> Validity:
        proof = next((proof for proof in _WORST_FIRST if proof in self.proofs), Proof.ACTIVE)
        return Validity(
            differences=tuple(self.differences),
            proof=proof,
            evidence=tuple(dict.fromkeys(self.evidence)),
            problems=tuple(dict.fromkeys(self.problems)),
        )


def texts_to_look_for(interventions: Sequence[Intervention], proofs: Sequence[ProofRule]) -> tuple[str, ...]:
    """What `read_facts` has to look for, in the baseline's starts too."""
    texts = [intervention.proof for intervention in interventions]
    for rule in proofs:
        texts += [*rule.active, *rule.refused]
    return tuple(dict.fromkeys(text for text in texts if text))


def check_arm(
    baseline: Sequence[ServerFacts],
    arm: Sequence[ServerFacts],
    interventions: Sequence[Intervention],
    *,
    declared: frozenset[str],
    proofs: Sequence[ProofRule],
    server: str,
    version: str,
    installed: Sequence[str] = (),
) -> Validity:
    """Compare what an arm ran with what the baseline ran.

    Args:
        baseline: facts of its starts.
        arm: facts of the arm's starts, read with `texts_to_look_for`.
        interventions: of the arm; none: the baseline against itself.
        declared: names of facts and arguments that they change by their nature (`consequences_of`).
        proofs: how the server shows that they are active (`proofs_of`).
        server: `sglang`, `vllm` or `other`.
        version: release, for messages; empty when it is not known.
        installed: paths of the config files that were put in place for this arm.

    Returns:
        `proof` `REFUSED` means: cannot activate. Any other problem: INVALID.
    """
    case = _Case()
    if not baseline or not arm:
        who = "the baseline" if not baseline else "this arm"
        case.problems.append(f"no start of {who} ran far enough to show what it runs")
        case.proofs.append(Proof.NOT_SEEN)
        return case.result()
    _check_starts(baseline, "the baseline", case)
    _check_starts(arm, "this arm", case)
    _check_differences(baseline, arm, interventions, declared, case)
    name = f"{server} {version}".strip()
    for rule in proofs:
        _check_rule(baseline, arm, rule, case, name)
    for one in interventions:
        own = proofs if len(interventions) == 1 else proofs_of(server, version, one)
        _check_shown(arm, one, own, case, name)
    for intervention in interventions:
        if intervention.configs or intervention.without_configs:
            proof, evidence, problems = prove_configs(baseline, arm, intervention, installed)
            case.proofs.append(proof)
            case.evidence += evidence
            case.problems += problems
    return case.result()


# --- nothing else differs ---------------------------------------------------------------------------


def _check_starts(starts: Sequence[ServerFacts], who: str, case: _Case) -> None:
    for what, one, other in disagreements(starts):
        mend = _mend(starts, what)
        case.problems.append(f"the starts of {who} differ in {what}: {one} and {other}{mend}")


def _mend(starts: Sequence[ServerFacts], what: str) -> str:
    flag = _KEPT_EQUAL_BY.get((starts[0].server, what))
    return f"; to keep it equal give {flag} to all arms" if flag is not None else ""


def _check_differences(
    baseline: Sequence[ServerFacts],
    arm: Sequence[ServerFacts],
    interventions: Sequence[Intervention],
    declared: frozenset[str],
    case: _Case,
) -> None:
    names = declared | own_names(interventions)
    files = {file for intervention in interventions for file in config_names(intervention)}
    free = any(one.without_configs or ("configs" in names and _moves_configs(one)) for one in interventions)
    for what, ours, theirs in differences(baseline, arm):
        may = (
            what in names
            or what.partition(" ")[2] in names
            or (what.startswith("config ") and (free or _of_pair(what[7:], files)))
            or (baseline[0].server == "other" and own_values(interventions, ours, theirs))
        )
        case.differences.append(Difference(printable(what, 400), ours, theirs, may))
        if not may:
            case.problems.append(
                f"{printable(what, 400)} is {theirs} in this arm and {ours} in the baseline, "
                f"which is no part of the intervention{_mend(baseline, what)}"
            )


def _moves_configs(intervention: Intervention) -> bool:
    """Whether lookups of any file may end in another way: a table changes only those of its own files."""
    return "configs" in intervention.may_change or bool(
        intervention.arguments or intervention.remove or intervention.environment
    )


def _of_pair(file: str, files: set[str]) -> bool:
    """Whether a lookup is about one of these files: an up file changes what the down lookup ends with."""
    return file in files or file.removesuffix("_down.json") + ".json" in files


# --- it was active ----------------------------------------------------------------------------------


def _check_shown(
    arm: Sequence[ServerFacts],
    intervention: Intervention,
    rules: Sequence[ProofRule],
    case: _Case,
    name: str,
) -> None:
    """The plan's own proof; and of what no rule can prove, what it changed."""
    if intervention.proof:
        _check_text(arm, intervention.proof, f"the proof of {intervention.name!r}", case)
        return
    if intervention.configs or intervention.without_configs:
        return
    if not any(rule.active or rule.argument is not None for rule in rules):
        _check_effect(arm, intervention, case, name)


def _check_rule(
    baseline: Sequence[ServerFacts], arm: Sequence[ServerFacts], rule: ProofRule, case: _Case, name: str
) -> None:
    what = printable(rule.what, 200)
    refusal = next((line for facts in arm for text in rule.refused if (line := _line(facts, text))), "")
    if refusal:
        case.proofs.append(Proof.REFUSED)
        case.evidence.append(refusal)
        case.problems.append(f"{name} refuses {what}: {refusal}")
        return
    if rule.active:
        shown = [next((line for text in rule.active if (line := _line(facts, text))), "") for facts in arm]
        if not all(shown):
            case.proofs.append(Proof.NOT_SEEN)
            case.problems.append(
                f"no proof that {what} was active: {name} prints {printable(rule.active[0], 160)!r}, which "
                f"{shown.count('')} of {len(arm)} logs lack"
            )
            return
        case.proofs.append(Proof.ACTIVE)
        case.evidence.append(shown[0])
        if not case.differences and all(any(_line(f, text) for text in rule.active) for f in baseline):
            case.problems.append(
                f"{what} is active in the baseline too: this arm changes nothing. The baseline needs the "
                "opposite flag"
            )
        return
    if rule.argument is not None:
        _check_argument(baseline, arm, rule.argument, what, case, name)


def _check_argument(
    baseline: Sequence[ServerFacts],
    arm: Sequence[ServerFacts],
    argument: tuple[str, str],
    what: str,
    case: _Case,
    name: str,
) -> None:
    """What the server prints nothing about: that it took the argument is all there is."""
    key, value = argument
    values = {facts.arguments.get(key, UNKNOWN) for facts in arm}
    if values != {value}:
        case.proofs.append(Proof.NOT_SEEN)
        case.problems.append(
            f"no proof that {what} was active: {name} resolved {key} to "
            f"{printable(', '.join(sorted(values)), 200)}, not to {value}"
        )
        return
    case.proofs.append(Proof.NO_LINE)
    case.evidence.append(f"resolved argument {key}={value} (no line of the log tells more)")
    if all(facts.arguments.get(key) == value for facts in baseline):
        case.problems.append(f"{key} is {value} in the baseline too: this arm changes nothing")


def _check_text(arm: Sequence[ServerFacts], text: str, what: str, case: _Case) -> None:
    shown = [_line(facts, text) for facts in arm]
    if all(shown):
        case.proofs.append(Proof.ACTIVE)
        case.evidence.append(shown[0])
    else:
        case.proofs.append(Proof.NOT_SEEN)
        case.problems.append(
            f"{what}, {printable(text, 160)!r}, is lacking in {shown.count('')} of {len(arm)} logs"
        )


def _check_effect(arm: Sequence[ServerFacts], intervention: Intervention, case: _Case, name: str) -> None:
    """No rule and no text: what the intervention changed among the facts has to show it."""
    own = own_names((intervention,))
    shown = [
        difference
        for difference in case.differences
        if difference.declared
        and (
            difference.what.partition(" ")[2] in own
            or difference.what in own
            or own_values((intervention,), difference.baseline, difference.arm)
        )
    ]
    if shown:
        case.proofs.append(Proof.NO_LINE)
        case.evidence += [f"{one.what}: {one.baseline} in the baseline, {one.arm} here" for one in shown]
        return
    case.proofs.append(Proof.NOT_SEEN)
    case.problems.append(
        f"no proof that {printable(intervention.name, 100)!r} was active: nothing that {name} logs or "
        f"answers changed with it in {len(arm)} starts; give the text of its log that shows it as `proof`"
    )


def _line(facts: ServerFacts, text: str) -> str:
    """The line of a log that holds a text, empty when none does."""
    wanted = printable(text, 1024)
    return next((printable(line, 400) for line in facts.lines if wanted in line), "")
