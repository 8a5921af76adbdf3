"""The Python interface: the verbs of the command line as functions."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

from moetune.applications.planning import Plan, make_plan
from moetune.applications.request import Request, TuneRequest
from moetune.applications.tuning import Tuned, tune_request
from moetune.domain.errors import MoetuneError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MoetuneError", "Plan", "Request", "TuneRequest", "Tuned", "plan", "tune"]

P = ParamSpec("P")
Asked = TypeVar("Asked", bound=Request)
Answer = TypeVar("Answer")


def _verb(
    name: str,
    text: str,
    request: Callable[P, Asked],
    answer: Callable[[Asked], Answer],
    answers: type[Answer],
) -> Callable[P, Answer]:
    """A function that takes what a request takes: its fields are the one list of parameters."""

    def verb(*args: P.args, **kwargs: P.kwargs) -> Answer:
        return answer(request(*args, **kwargs))

    verb.__name__ = verb.__qualname__ = name
    described = [kind for kind in inspect.getmro(cast("type", request)) if kind is not object]
    verb.__doc__ = "\n\n".join([text, *(inspect.getdoc(kind) or "" for kind in described)])
    signature = inspect.signature(request)
    verb.__signature__ = signature.replace(return_annotation=answers)  # type: ignore[attr-defined]
    return verb


plan = _verb(
    "plan",
    "Say what the server will run, what it looks for, and what tuned files would gain.",
    Request,
    make_plan,
    Plan,
)
tune = _verb(
    "tune",
    "Find configs and write the server's files.",
    TuneRequest,
    tune_request,
    Tuned,
)
