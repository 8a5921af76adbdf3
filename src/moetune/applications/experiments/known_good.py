"""The state before an experiment: what it was, how arms change it for a while, and how it comes back.

Config files of an arm go through the same machinery as `moetune install`: transactions with backups,
relative to directory descriptors. Their ledger lies in the folder of the run, so that whatever it holds
is an arm's and is to be taken back: after a start, after a failure, by the next call after a crash.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.applications.atomic import open_places
from moetune.applications.experiments.far_configs import far_files
from moetune.applications.experiments.known_state import FileThere, KnownGood, config_paths, files_there
from moetune.applications.experiments.redaction import redacted_arguments, redacted_variables
from moetune.applications.install_checks import Checked
from moetune.applications.install_plan import Change, FileChange, InstallRequest, Prepared, prepare_install
from moetune.applications.install_target import find_target
from moetune.applications.installing import install
from moetune.applications.manifest import MAX_FILE_BYTES, check_target, digest, open_ledger
from moetune.applications.provenance import provenance_name
from moetune.applications.transaction import recover
from moetune.applications.uninstalling import UninstallRequest, uninstall
from moetune.domain.errors import InputError, OutputError
from moetune.domain.text import printable

if TYPE_CHECKING:
    from moetune.applications.install_target import Target
    from moetune.applications.manifest import Entry, Install
    from moetune.domain.experiment_plan import Intervention, Plan

_DOWN = re.compile(r"_down(?=\.json$)")


class ConfigArms:
    """Puts the config files of arms in place, and takes them back.

    Args:
        plan: the experiment.
        folder: of the run; the ledger of what arms have put in place lies in it.
        environ: variables of this process.
    """

    def __init__(self, plan: Plan, folder: Path, environ: Mapping[str, str]) -> None:
        self._plan, self._folder = plan, folder
        self._environ = {**environ, **_kept(plan.server.environment)}
        self._server = plan.server

    @property
    def needed(self) -> bool:
        """Whether an arm changes files of this machine."""
        return not self._server.host and any(map(touches_files, self._plan.interventions))

    def known_good(self, state: Path) -> KnownGood:
        """Look at the state before the first arm.

        Raises:
            MoetuneError: when it cannot be looked at.
        """
        server = self._server
        seen = KnownGood(
            server=server.name,
            version=server.version,
            triton_version=server.triton_version,
            command=redacted_arguments(server.command),
            environment=redacted_variables(server.environment),
            host=server.host,
        )
        if not self.needed:
            return seen
        target = self._target(())
        with open_ledger(state, writing=False) as ledger:
            installs = tuple(one.id for one in ledger.manifest.installs if one.root == str(target.root))
        return replace(
            seen,
            version=target.server.version,
            triton_version=target.server.triton_version,
            root=str(target.root),
            files=files_there(target.root),
            installs=installs,
        )

    def check(self, intervention: Intervention) -> None:
        """See whether an intervention's files could be put in place; nothing is changed.

        Raises:
            MoetuneError: with the reason.
        """
        if not touches_files(intervention):
            return
        if self._server.host:
            far_files(self._server, intervention)
            return
        if intervention.configs:
            self._prepare(intervention)
        else:
            self._target(())

    def put(self, interventions: Sequence[Intervention], looked_for: Sequence[str]) -> tuple[str, ...]:
        """Put the files of an arm in place.

        Args:
            interventions: of the arm.
            looked_for: names of the files that the server looks for, as its baseline's log says them.

        Returns:
            Paths of the config files that are now there for it.

        Raises:
            MoetuneError: when they cannot be; what was done is still to be taken back.
        """
        return tuple(
            path
            for one in interventions
            if touches_files(one) and not self._server.host
            for path in self._put(one, looked_for, self._folder)[1]
        )

    def keep(
        self,
        interventions: Sequence[Intervention],
        looked_for: Sequence[str],
        state: Path,
        before: Sequence[str],
    ) -> tuple[str, ...]:
        """Put files in place to stay, recorded as `moetune install` records them.

        Args:
            interventions: that helped.
            looked_for: names of the files that the server looks for.
            state: the state directory.
            before: names of the installs that were there before the experiment.

        Returns:
            Names of the installs, also of those that a call before this one made and could not record.

        Raises:
            MoetuneError: when they cannot be put there.
        """
        mine = [one for one in interventions if touches_files(one) and not self._server.host]
        if not mine:
            return ()
        root = str(self._target(()).root)

        def made() -> dict[tuple[str, ...], str]:
            with open_ledger(state, writing=True) as ledger:
                recover(ledger)
                installs = ledger.manifest.installs
            return {one.sources: one.id for one in installs if one.root == root and one.id not in before}

        for one in mine:
            if _sources(one) not in made():
                self._put(one, looked_for, state)
        found = made()
        return tuple(found[_sources(one)] for one in mine if _sources(one) in found)

    def take_back(self) -> bool:
        """Bring back what was there before the files of an arm; whether there was anything to do.

        Raises:
            MoetuneError: when it cannot be done.
        """
        return take_back(self._folder, self._environ)

    def _put(
        self, intervention: Intervention, looked_for: Sequence[str], state: Path
    ) -> tuple[str, tuple[str, ...]]:
        prepared = self._prepare(intervention) if intervention.configs else self._removal(looked_for)
        prepared = replace(prepared, request=replace(prepared.request, state=state))
        installed = install(prepared, self._environ)
        if installed.left:
            raise OutputError(f"{printable(installed.left[0], 300)} was changed by somebody else meanwhile")
        if not installed.found:
            raise OutputError("the server's own lookup does not find the files where they were put")
        root = prepared.target.root
        return installed.id, tuple(f"{root}/{path}" for path in prepared.checked.lookups)

    def _prepare(self, intervention: Intervention) -> Prepared:
        paths = tuple(map(Path, intervention.configs))
        return prepare_install(replace(self._request(), paths=paths), self._environ)

    def _request(self) -> InstallRequest:
        server = self._server
        return InstallRequest(
            paths=(),
            server=server.name,
            server_version=server.version or None,
            triton_version=server.triton_version or None,
            root=Path(server.config_root) if server.config_root else None,
        )

    def _target(self, sources: tuple[()]) -> Target:
        request = self._request()
        return find_target(
            sources,
            self._environ,
            server=request.server,
            server_version=request.server_version,
            triton_version=request.triton_version,
            root=request.root,
        )

    def _removal(self, looked_for: Sequence[str]) -> Prepared:
        """Take away every file of the names that the server looks for, of any Triton version."""
        names = {part for name in looked_for for part in _pair(name)}
        if not names:
            raise InputError(
                "which config files the server looks for is not known: the baseline's log names none"
            )
        target = self._target(())
        paths = [path for path in config_paths(target.root) if path.rpartition("/")[2] in names]
        beside = {provenance_name(path) for path in paths}
        paths += [path for path in config_paths(target.root) if path in beside]
        for path in paths:
            check_target(path)
        if not paths:
            raise InputError(
                f"there is nothing to take away: {printable(str(target.root), 300)} holds none of the files "
                "that the server looks for"
            )
        before = {one.path: one.sha256 for one in files_there(target.root)}
        return Prepared(
            request=self._request(),
            target=target,
            changes=tuple(FileChange(path, "", Change.REMOVE) for path in paths),
            contents=dict.fromkeys(paths, None),
            before={path: before.get(path) for path in paths},
            checked=Checked((), (), {}, ()),
            notes=(),
            copied=(),
        )


def touches_files(intervention: Intervention) -> bool:
    """Whether an intervention changes config files."""
    return bool(intervention.configs) or intervention.without_configs


def take_back(folder: Path, environ: Mapping[str, str], *, forget: bool = False) -> bool:
    """Bring back what was there before the files of an arm, from the ledger in a run's folder.

    Args:
        folder: of the run.
        environ: variables of this process.
        forget: leave what somebody else has changed as it is, for good.

    Returns:
        Whether there was anything to do.

    Raises:
        MoetuneError: when it cannot be done, or somebody else has changed the files meanwhile.
    """
    with open_ledger(folder, writing=False) as ledger:
        if ledger.journal() is None and not ledger.manifest.installs:
            return False
    with open_ledger(folder, writing=True) as ledger:
        recover(ledger)
        for one in ledger.manifest.installs:
            back = frozenset(entry.path for entry in one.entries if _is_back(one, entry))
            if back:
                # Somebody has put there already what was there before.
                ledger.write_manifest(ledger.manifest.without(one.id, back))
        installs = ledger.manifest.installs
    left: list[str] = []
    for one in reversed(installs):
        request = UninstallRequest(what=one.id, root=Path(one.root), state=folder, forget=forget)
        left += uninstall(request, environ).left
    if left and not forget:
        raise OutputError(
            f"{', '.join(printable(path, 300) for path in left[:3])} was changed by somebody else while an "
            "arm was in place, and is left as it is",
            f"keep it so with moetune uninstall {folder.name} --forget; or put the bytes of before there: "
            f"they lie in {printable(str(folder), 300)}/installs/blobs, by their SHA-256",
        )
    return True


def _sources(intervention: Intervention) -> tuple[str, ...]:
    """What an install of its files records as where they come from."""
    return tuple(str(Path(path).absolute()) for path in intervention.configs)


def _is_back(install: Install, entry: Entry) -> bool:
    """Whether what was there before stands there, and not what the arm has put there."""
    before = None if entry.before is None else entry.before.sha256
    try:
        with open_places(Path(install.root), [entry.path], writing=False) as places:
            content = places.read(entry.path, MAX_FILE_BYTES)
    except OutputError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            return False
        content = None
    return before != entry.written and before == (None if content is None else digest(content))


def _kept(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of a plan: an empty one takes one out, which for a directory says nothing."""
    return {name: value for name, value in environment.items() if value}


def _pair(name: str) -> tuple[str, str]:
    """Names of the files of both kernels."""
    up = _DOWN.sub("", name)
    return up, up.removesuffix(".json") + "_down.json"


__all__ = ["ConfigArms", "FileThere", "KnownGood", "files_there", "take_back", "touches_files"]
