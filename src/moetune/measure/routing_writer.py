"""The process that writes what SGLang's separate tuner reads: plain tensors, by torch.save.

`python -m moetune.measure.routing_writer DESCRIPTOR` gets the directory open, and on its input frames of
`routing_frames`, each with the name of its file before it.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys

from moetune.domain.recording import MAX_IDS
from moetune.measure.routing_frames import MAX_LINE, note_bytes, read_frame

NAME = re.compile(r"topk_ids_layer(\d{1,4})_idx(\d{1,6})\.pt", re.ASCII)
"""As `load_topk_ids` of SGLang's benchmark/kernels/fused_moe_triton/tuning_fused_moe_triton_sep.py has it."""


def main(arguments: list[str]) -> int:
    """Write the files."""
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - whatever it is, there is no torch here
        sys.stdout.buffer.write(note_bytes("torch", why=f"torch cannot be imported: {type(error).__name__}"))
        return 0
    folder, source = int(arguments[0]), sys.stdin.buffer
    while line := source.readline(MAX_LINE):
        name = json.loads(line)["name"]
        if not NAME.fullmatch(name):
            raise ValueError("a file of another name")
        frame = read_frame(json.loads(source.readline(MAX_LINE)), source.read, 1, MAX_IDS)
        buffer = io.BytesIO()
        # int32, as select_experts gives them; a copy, since what was read cannot be written to.
        torch.save(torch.from_numpy(frame.data.copy()), buffer)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, 0o666, dir_fd=folder), "wb") as file:
            file.write(buffer.getbuffer())
    sys.stdout.buffer.write(note_bytes("done"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
