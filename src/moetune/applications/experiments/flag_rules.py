"""What the table of flags says of the interventions of an arm, as its judging needs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moetune.applications.experiments.validity import texts_to_look_for
from moetune.servers.flags import ProofRule, consequences_of, proofs_of

if TYPE_CHECKING:
    from moetune.domain.experiment_plan import Intervention, Plan


def declared_of(server: str, version: str, interventions: Sequence[Intervention]) -> frozenset[str]:
    """Names of facts and arguments that interventions change by their nature."""
    return frozenset(name for one in interventions for name in consequences_of(server, version, one))


def proof_rules(server: str, version: str, interventions: Sequence[Intervention]) -> tuple[ProofRule, ...]:
    """How the server shows that interventions are active."""
    rules = (rule for one in interventions for rule in proofs_of(server, version, one))
    return tuple(dict.fromkeys(rules))


def proof_texts(plan: Plan) -> tuple[str, ...]:
    """Texts to look for in the log of every start, the baseline's too."""
    rules = proof_rules(plan.server.name, plan.server.version, plan.interventions)
    return texts_to_look_for(plan.interventions, rules)
