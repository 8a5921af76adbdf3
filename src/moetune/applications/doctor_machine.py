"""`moetune doctor` without a log: this machine, its servers and GPUs, fit to paste into a bug report."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moetune import __version__
from moetune.applications.environment import Environment, config_trees, find_installed, inspect_environment
from moetune.applications.nvml import Detected, detect_gpus
from moetune.domain.errors import MoetuneError
from moetune.servers.registry import open_server

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA = "moetune.machine/1"
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ServerHere:
    """A server that is installed for this interpreter.

    Attributes:
        trees: where it reads tuned files, and how many lie there.
        problem: why its rules are not known; empty when they are.
    """

    name: str
    version: str
    trees: tuple[tuple[str, int], ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """What moetune sees of this machine; secrets are redacted."""

    environment: Environment
    gpus: Detected
    servers: tuple[ServerHere, ...]

    def to_json(self) -> dict[str, Any]:
        """The document of `moetune doctor --json`."""
        environment = self.environment
        return {
            "schema": SCHEMA,
            "moetune": __version__,
            "python": environment.python,
            "packages": {name: package.version for name, package in environment.packages.items()},
            "variables": dict(environment.variables),
            "gpus": [
                {
                    "index": device.index,
                    "name": device.name,
                    "compute_capability": device.compute_capability,
                    "memory_total_bytes": device.memory_total_bytes,
                    "memory_used_bytes": device.memory_used_bytes,
                    "processes": len(device.processes),
                }
                for device in self.gpus.devices
            ],
            "no_gpus_because": list(self.gpus.reasons),
            "servers": [
                {
                    "name": server.name,
                    "version": server.version,
                    "trees": [{"root": root, "files": count} for root, count in server.trees],
                    "problem": server.problem,
                }
                for server in self.servers
            ],
        }

    def fields(self) -> list[tuple[str, str]]:
        """For people."""
        environment = self.environment
        packages = ", ".join(f"{name} {package.version}" for name, package in environment.packages.items())
        rows = [("moetune", __version__), ("python", environment.python), ("packages", packages or "none")]
        rows += [("GPU", _device_text(device)) for device in self.gpus.devices]
        rows += [("no GPU", reason) for reason in self.gpus.reasons] if not self.gpus.devices else []
        for server in self.servers:
            rows.append((server.name, f"{server.version}{': ' + server.problem if server.problem else ''}"))
            rows += [("reads", f"{root}: {count} files") for root, count in server.trees]
        rows += [("variable", f"{name}={value}") for name, value in environment.variables.items()]
        return rows


def _device_text(device: Any) -> str:  # noqa: ANN401 - nvml.Device
    memory = f", {device.memory_total_bytes / _GIB:.0f} GiB" if device.memory_total_bytes else ""
    busy = f", {len(device.processes)} processes on it" if device.processes else ""
    return f"{device.index}: {device.name} ({device.compute_capability}){memory}{busy}"


def inspect_machine(environ: Mapping[str, str] | None = None) -> Machine:
    """Look at this machine; imports no server and starts nothing.

    Args:
        environ: the variables; None takes those of this process.
    """
    variables = os.environ if environ is None else environ
    environment = inspect_environment(variables)
    servers = tuple(_server_here(package.name, package.version, variables) for package in environment.servers)
    return Machine(environment, detect_gpus(), servers)


def _server_here(name: str, version: str, environ: Mapping[str, str]) -> ServerHere:
    try:
        server = open_server(name, version)
        trees = config_trees(server, environ, find_installed(name))
    except MoetuneError as error:
        return ServerHere(name, version, problem=error.message)
    counted = tuple((tree.root, sum(map(len, (tree.directories or {}).values()))) for tree in trees)
    return ServerHere(name, version, counted)
