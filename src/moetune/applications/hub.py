"""The Hugging Face hub: files of a checkpoint from its cache or from the network, text only.

Nothing but `config.json` and ModelOpt's `hf_quant_config.json` is ever asked for, and no code of a
checkpoint runs. `huggingface_hub` is imported when it is needed and may be missing.
"""

from __future__ import annotations

import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from moetune.domain.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

FILES = ("config.json", "hf_quant_config.json")
MAX_FILE_BYTES = 16 << 20
_ID = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?", re.A)


class HubUnreachableError(ModelError):
    """The hub did not answer, or not in time."""


class Hub(Protocol):
    """Where files of a checkpoint can be had."""

    def cached(self, repo: str, filename: str) -> Path | None:
        """A file that is on this machine already; None when it is not."""
        ...

    def fetch(self, repo: str, filename: str) -> Path | None:
        """A file from the network; None when the repository lacks it.

        Raises:
            HubUnreachableError: when the network does not answer.
            ModelError: when the repository is unknown, gated, or the file too large.
        """
        ...


def is_hub_id(name: str) -> bool:
    """Whether a name can be the id of a repository: one or two parts of letters, digits, `-_.`."""
    parts = name.split("/")
    return (
        len(name) <= 96
        and len(parts) in (1, 2)
        and all(_ID.fullmatch(part) and "--" not in part and ".." not in part for part in parts)
        and not name.endswith(".git")
    )


@dataclass(frozen=True, slots=True)
class HuggingFaceHub:
    """The hub through `huggingface_hub`, with its own cache, token and endpoint settings.

    Attributes:
        timeout_s: for one answer of the network.
        deadline_s: for all of one file, name lookup included: an unreachable hub fails fast.
    """

    timeout_s: float = 5.0
    deadline_s: float = 15.0

    def cached(self, repo: str, filename: str) -> Path | None:
        """See `Hub`; nothing is cached for this process where `huggingface_hub` is missing."""
        try:
            from huggingface_hub import try_to_load_from_cache
        except ImportError:
            return None
        found = try_to_load_from_cache(repo, filename)
        return Path(found) if isinstance(found, str) else None

    def fetch(self, repo: str, filename: str) -> Path | None:
        """See `Hub`."""
        try:
            import huggingface_hub as hub
            from huggingface_hub import errors
        except ImportError:
            raise HubUnreachableError(
                f"{repo} is not packaged, and huggingface_hub is not installed to fetch its config.json",
                "pip install moetune[hub], or pass the path of a config.json",
            ) from None

        def download() -> Path | None:
            metadata = hub.get_hf_file_metadata(hub.hf_hub_url(repo, filename), timeout=self.timeout_s)
            if metadata.size is not None and metadata.size > MAX_FILE_BYTES:
                raise ModelError(
                    f"{filename} of {repo} has {metadata.size} bytes, more than {MAX_FILE_BYTES}"
                )
            return Path(hub.hf_hub_download(repo, filename, etag_timeout=self.timeout_s))

        try:
            with _no_telemetry(hub.constants):
                return _within(self.deadline_s, download)
        except ModelError:
            raise
        except errors.GatedRepoError:
            raise ModelError(
                f"{repo} is gated, and the hub does not give its config.json to this account",
                "accept its licence on its page and log in with `hf auth login`, or pass the path of its "
                "config.json",
            ) from None
        except errors.RepositoryNotFoundError:
            raise ModelError(f"the hub knows no model {repo}, or keeps it private") from None
        except errors.EntryNotFoundError as missing:
            if not isinstance(missing, errors.LocalEntryNotFoundError):
                return None
            raise _unreachable(repo, missing) from None
        # Whatever a client library raises for a network that is not there, the answer is the same.
        except Exception as failure:  # noqa: BLE001
            raise _unreachable(repo, failure) from None


@contextmanager
def _no_telemetry(constants: ModuleType) -> Iterator[None]:
    """Keep the client from requests that are not about the model.

    huggingface_hub 2.x asks `/api/agent-harnesses` before its first request and names the packages of
    this environment in its user agent, unless this is set; an environment variable would come too
    late where the module is imported already.
    """
    before = getattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)
    constants.HF_HUB_DISABLE_TELEMETRY = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_TELEMETRY = before  # type: ignore[attr-defined]


def _unreachable(repo: str, failure: Exception) -> HubUnreachableError:
    return HubUnreachableError(
        f"{repo} is not packaged, and the hub cannot be reached to look it up ({type(failure).__name__})",
        "pass the path of a config.json",
    )


def _within(seconds: float, work: Callable[[], Path | None]) -> Path | None:
    """Run something that may hang in name resolution, which no timeout of a client covers."""
    result: list[Path | None] = []
    failure: list[Exception] = []

    def run() -> None:
        try:
            result.append(work())
        except Exception as error:  # noqa: BLE001 - handed to the caller
            failure.append(error)

    # A daemon: a name server that never answers must not hold the process at its end either.
    thread = threading.Thread(target=run, name="moetune-hub", daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not result:
        raise TimeoutError(f"no answer in {seconds} seconds")
    return result[0]
