"""What the table of flags says of the interventions of a plan, as the judging of their arms needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moetune.applications.experiments.validity import texts_to_look_for

if TYPE_CHECKING:
    from moetune.applications.experiments.validity import ProofRule
    from moetune.domain.experiment_plan import Intervention


@dataclass(frozen=True, slots=True)
class FlagRules:
    """What is known of interventions.

    Attributes:
        consequences: names of facts that interventions change by their nature.
        proofs: how the server shows that they are active.
    """

    consequences: Callable[[Sequence[Intervention]], frozenset[str]]
    proofs: Callable[[Sequence[Intervention]], tuple[ProofRule, ...]]

    def texts(self, interventions: Sequence[Intervention]) -> tuple[str, ...]:
        """Texts to look for in the logs of all arms."""
        return texts_to_look_for(interventions, self.proofs(interventions))


NOTHING_KNOWN = FlagRules(lambda _: frozenset(), lambda _: ())
"""Of a server without a table."""
