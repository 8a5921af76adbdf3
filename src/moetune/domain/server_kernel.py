"""The kernels of an installed server, as data: which file holds them."""

from __future__ import annotations

from dataclasses import dataclass

from moetune.domain.text import printable

OWN = "moetune"
"""What a problem names as its kernel source where moetune's own kernel stands for the server's."""

_SHOWN_DIGITS = 12


@dataclass(frozen=True, slots=True)
class KernelFile:
    """A Python file of a server that holds its fused-MoE Triton kernels.

    Attributes:
        server: `sglang` or `vllm`.
        version: of that server.
        path: of the file, absolute.
        module: its dotted name in the server.
        sha256: of its bytes. What is timed later has to be that file still.
    """

    server: str
    version: str
    path: str
    module: str
    sha256: str

    @property
    def source(self) -> str:
        """What a problem names as its kernel source: another text is another kernel."""
        return f"{self.server} {self.version} {self.sha256[:_SHOWN_DIGITS]}"

    @property
    def text(self) -> str:
        """In words."""
        return printable(f"{self.server} {self.version}'s own, {self.path}", 600)
