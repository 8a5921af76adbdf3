"""Under which names a server resolves the arguments that an intervention sets."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from moetune.domain.experiment_plan import Intervention

# Spellings of the command line whose field has another name (`server_args.py` of the sglang wheels,
# `engine/arg_utils.py` of the vllm wheels).
_FIELDS: Mapping[str, str] = {
    "model": "model_path",
    "tensor_parallel_size": "tp_size",
    "tp": "tp_size",
    "pipeline_parallel_size": "pp_size",
    "data_parallel_size": "dp_size",
    "dp": "dp_size",
    "expert_parallel_size": "ep_size",
    "ep": "ep_size",
    "max_model_len": "max_seq_len",
    "cc": "compilation_config",
    "O": "optimization_level",
}
_NEGATIONS = ("no_", "disable_", "enable_")


def own_names(interventions: Sequence[Intervention]) -> frozenset[str]:
    """Names of arguments and facts that interventions set or declare themselves."""
    names = {name for one in interventions for name in one.may_change}
    for intervention in interventions:
        for argument in (*intervention.arguments, *intervention.remove):
            names.update(_names(argument))
    return frozenset(names)


def _names(argument: str) -> Iterator[str]:
    """`--no-enable-x=1` and `--compilation-config.mode` by the names of their fields."""
    if not argument.startswith("-"):
        return
    name = argument.lstrip("-").partition("=")[0].partition(".")[0].replace("-", "_")
    yield name
    if name in _FIELDS:
        yield _FIELDS[name]
    for negation in _NEGATIONS:
        if name.startswith(negation):
            yield name.removeprefix(negation)
    if name.startswith("no_"):
        yield f"enable_{name[3:]}"


def own_values(interventions: Sequence[Intervention], baseline: str, arm: str) -> bool:
    """Whether the arm's value is one that an intervention gives, or the baseline's one that it takes out."""
    given = {value for one in interventions for value in one.arguments}
    taken = {value for one in interventions for value in one.remove}
    return arm in given or baseline in taken
