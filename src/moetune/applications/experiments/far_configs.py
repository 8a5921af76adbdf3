"""Config files of arms on another host: a folder for each, which the server's directory variable names.

Nothing of that host is changed, so that nothing is to be taken back: an arm without the variable reads
what the server read before. The folders are removed at the end, or by `moetune uninstall RUN`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.applications.experiments import remote
from moetune.applications.install_plan import InstallRequest, prepare_install
from moetune.applications.install_target import is_nested
from moetune.applications.provenance import SUFFIX
from moetune.domain.errors import InputError
from moetune.servers.registry import open_server

if TYPE_CHECKING:
    from moetune.applications.experiments.record import Record
    from moetune.domain.experiment_plan import Intervention, ServerPlan

_NOWHERE = Path("/moetune-nowhere")
"""Stands for the folder while files are judged: nothing lies there."""


@dataclass(frozen=True, slots=True)
class FarFiles:
    """What a config arm needs on another host.

    Attributes:
        variable: that names the folder to the server.
        files: path below the folder to content; none: the folder is empty, and hides what is there.
    """

    variable: str
    files: Mapping[str, bytes]


def far_files(server: ServerPlan, intervention: Intervention) -> FarFiles:
    """The files of an intervention, judged as `moetune install` judges them.

    Raises:
        MoetuneError: when they cannot be used there.
    """
    opened = open_server(server.name, server.version or None, server.triton_version or None)
    variable = opened.directory_variable
    if variable is None:
        raise InputError(f"{opened.name} {opened.version} reads no directory that a variable names")
    if intervention.without_configs:
        if not is_nested(opened):
            raise InputError(
                f"on {server.host} the files of {opened.name} itself cannot be taken away: what its variable "
                "names is looked at beside them"
            )
        return FarFiles(variable, {})
    request = InstallRequest(
        paths=tuple(map(Path, intervention.configs)),
        server=server.name,
        server_version=server.version or None,
        triton_version=server.triton_version or None,
        root=_NOWHERE,
    )
    contents = prepare_install(request, {}).contents
    files = {
        path: content
        for path, content in contents.items()
        if content is not None and not path.endswith(SUFFIX)
    }
    return FarFiles(variable, files)


class FarConfigs:
    """Puts the files of arms on another host, once a run.

    Args:
        server: the known-good server.
        record: remembers the folders.
        put: writes files there, and says where.
        remove: removes such a folder.
    """

    def __init__(
        self,
        server: ServerPlan,
        record: Record,
        put: Callable[[str, Mapping[str, bytes]], str] = remote.put_files,
        remove: Callable[[str, str], None] = remote.remove_files,
    ) -> None:
        self._server, self._record, self._put, self._remove = server, record, put, remove

    def placed(self, interventions: Sequence[Intervention]) -> tuple[Intervention, ...]:
        """The interventions as they run there: with the variable that names their folder.

        Raises:
            MoetuneError: when the files cannot be written there.
        """
        return tuple(self._placed(one) for one in interventions)

    def paths(self, interventions: Sequence[Intervention]) -> tuple[str, ...]:
        """Where the config files of interventions lie there."""
        known = self._record.facts.far
        return tuple(
            f"{known[one.name]}/{path}"
            for one in interventions
            if one.configs and one.name in known
            for path in far_files(self._server, one).files
        )

    def remove(self) -> None:
        """Remove the folders.

        Raises:
            MoetuneError: when one cannot be removed.
        """
        for name, folder in sorted(self._record.facts.far.items()):
            self._remove(self._server.host, folder)
            self._record.add("far gone", intervention=name)

    def _placed(self, one: Intervention) -> Intervention:
        if not self._server.host or not (one.configs or one.without_configs):
            return one
        wanted = far_files(self._server, one)
        if one.name not in self._record.facts.far:
            folder = self._put(self._server.host, wanted.files)
            self._record.add("far", intervention=one.name, folder=folder)
        folder = self._record.facts.far[one.name]
        return replace(one, environment={**one.environment, wanted.variable: folder})
