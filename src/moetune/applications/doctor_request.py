"""What is asked of the doctor: logs, what a person says beside them, and the files that the server read."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from moetune.applications.doctor import Diagnosis, diagnose
from moetune.applications.doctor_solve import Known
from moetune.applications.path_arguments import AnyPaths, as_paths
from moetune.domain.errors import InputError

_MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DoctorRequest:
    """Logs of SGLang or vLLM, and what is known beside them.

    Attributes:
        logs: files, `.gz` too; `-` is standard input.
        model: as for `tune`; None: what the log says.
        gpu: name of the GPU; None: what the file names say.
        server_version: None: what the log says.
        compute_capability: of a GPU that the registry does not know.
        offline: never ask the network about the model.
        configs: config files that the server read, for the entry that a crash is about.
    """

    logs: AnyPaths
    _: KW_ONLY
    model: str | None = None
    gpu: str | None = None
    server_version: str | None = None
    compute_capability: str | None = None
    offline: bool = False
    configs: AnyPaths = ()


def diagnose_request(request: DoctorRequest) -> Diagnosis:
    """Read the logs and say what is wrong.

    Raises:
        InputError: for what cannot be read, or holds no line of a server.
    """
    known = Known(
        request.model, request.gpu, request.server_version, request.compute_capability, request.offline
    )
    logs = [str(path) for path in as_paths(request.logs)]
    return diagnose(logs, known, config_files=[_config(path) for path in as_paths(request.configs)])


def _config(path: Path) -> tuple[str, str]:
    """A file that a person names, never one that a log names."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > _MAX_CONFIG_BYTES:
        raise InputError(f"{path} is larger than {_MAX_CONFIG_BYTES >> 20} MiB: no config file is")
    return str(path), data.decode("utf-8", "replace")
