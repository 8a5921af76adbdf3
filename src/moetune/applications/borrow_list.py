"""`moetune borrow --list`: the published tuned files that could serve a model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moetune import __version__
from moetune.applications.catalogue import TunedFile, tuned_files
from moetune.applications.checkpoints import resolve
from moetune.applications.environment import config_trees
from moetune.applications.planning import asked_gpus, open_asked

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moetune.applications.request import Request

SCHEMA = "moetune.borrow-list/1"


@dataclass(frozen=True, slots=True)
class ListingPart:
    """What there is for one GPU.

    Attributes:
        gpu: its name.
        file_name: what the server looks for.
        files: best first.
    """

    gpu: str
    file_name: str
    files: tuple[TunedFile, ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """The answer to `moetune borrow --list`.

    Attributes:
        server: name, version, Triton.
        parts: one for each GPU.
        assumed: what nobody said and was taken, in words.
    """

    server: tuple[str, str, str]
    parts: tuple[ListingPart, ...]
    assumed: tuple[str, ...]

    @property
    def found(self) -> bool:
        """Whether there is anything at all."""
        return any(part.files for part in self.parts)

    def to_json(self) -> dict[str, Any]:
        """The document of `moetune borrow --list --json`."""
        return {
            "schema": SCHEMA,
            "moetune": __version__,
            "server": dict(zip(("name", "version", "triton_version"), self.server, strict=True)),
            "gpus": [
                {
                    "gpu": part.gpu,
                    "file_name": part.file_name,
                    "files": [file.to_json() for file in part.files],
                }
                for part in self.parts
            ],
            "assumed": list(self.assumed),
        }


def list_tuned(request: Request, environ: Mapping[str, str] | None = None) -> Listing:
    """List what could be borrowed for a model, on each GPU.

    Args:
        request: the model, its split, the server and the GPUs.
        environ: the variables of the server; None takes those of this process.

    Raises:
        MoetuneError: for what cannot be answered.
    """
    environ = os.environ if environ is None else environ
    layer = resolve(request.model, offline=request.offline, overrides=request.overrides)
    server, installed, assumed = open_asked(request)
    trees = config_trees(server, environ, installed)
    parts = []
    for gpu in asked_gpus(request):
        problem = server.problem(layer, request.parallelism, gpu, request.server_options)
        parts.append(
            ListingPart(gpu.torch_name, server.file_name(problem, "up"), tuned_files(server, problem, trees))
        )
    return Listing((server.name, server.version, server.triton_version), tuple(parts), assumed)
