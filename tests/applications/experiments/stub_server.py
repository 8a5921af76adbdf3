# ruff: noqa: PTH110, PTH118, PTH123, PTH207
"""A server that starts in a tenth of a second: SGLang 0.5.23's lines and endpoints, effects by its flags.

It reads the config directory that SGLANG_MOE_CONFIG_DIR names, as SGLang does, and is as fast as what it
finds there and its flags say. Its noise depends on how many starts the run's journal holds, so that a
killed and resumed experiment sees the numbers that one in a single piece sees.
"""

from __future__ import annotations

import glob
import json
import os
import random
import signal
import socket
import sys
import time

NAME = "E=64,N=256,device_name=NVIDIA_H200"
SPEED = {"32": 0.9, "64": 1.1, "128": 1.2}
FLAGS = {"--port": 1, "--api-key": 1, "--enable-mixed-chunk": 0}


def say(text: str) -> None:
    sys.stdout.write(f"[2026-01-01 20:00:00] {text}\n")
    sys.stdout.flush()


def options(words: list[str]) -> dict[str, str]:
    """Resolved arguments of the command line."""
    found = {"api_key": "None", "enable_mixed_chunk": "False"}
    place = 0
    while place < len(words):
        name, takes = words[place], FLAGS[words[place]]
        found[name.lstrip("-").replace("-", "_")] = words[place + 1] if takes else "True"
        place += 1 + takes
    return found


def own(name: str, default: str = "") -> str:
    """What the stub is told by a variable: STUB_FAULT, STUB_FAST, STUB_NOISE, STUB_RUNS, STUB_KV, ..."""
    return os.environ.get(f"STUB_{name}", default)


def lookup() -> float:
    """Say what SGLang's lookup says, and how fast the up kernel is then."""
    folder = os.path.join(os.environ.get("SGLANG_MOE_CONFIG_DIR", "/nowhere"), "configs", "triton_3_6_0")
    speed = 1.0
    for kernel in ("", "_down"):
        path = os.path.join(folder, f"{NAME}{kernel}.json")
        if os.path.exists(path):
            say(f"Using MoE kernel config from {path}.")
            if not kernel:
                with open(path) as file:
                    first = next(iter(json.load(file).values()))
                speed = SPEED.get(str(first["BLOCK_SIZE_M"]), 1.0)
        elif kernel and speed != 1.0:
            say(
                f"Down MoE config file not found at {path}; reusing the tuned up-projection config without "
                "TMA. Performance might be sub-optimal."
            )
        else:
            say(
                "Using default MoE kernel config. Performance might be sub-optimal! Config file not found at "
                f"{path}, you can create them with https://github.com/sgl-project/sglang/tree/main"
            )
    return speed


def noise() -> float:
    size = float(own("NOISE", "0"))
    journal = next(iter(glob.glob(os.path.join(own("RUNS"), "e*", "journal.jsonl"))), "")
    count = 0
    if size and os.path.exists(journal):
        with open(journal) as file:
            count = sum('"kind":"start"' in line and '"preparing":false' in line for line in file)
    return random.Random(f"noise {count}").gauss(1.0, size)


def main() -> None:
    given = options(sys.argv[1:])
    fault = own("FAULT")
    if fault == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    arguments = {"model_path": "made-up/moe", "tp_size": 1, "moe_runner_backend": "triton"}
    arguments |= {name: value for name, value in given.items() if name != "port"}
    say(f"server_args={arguments}")
    for name in ("FAULT", "FAST", "SAY"):
        if own(name):
            say(f"stub {name}: {own(name)}")
    if fault == "dies at start":
        raise SystemExit("ValueError: the stub dies as it was told")
    limits = "chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=48, context_len=4096"
    say(f"max_total_num_tokens={own('KV', '100000')}, {limits}, available_gpu_mem=12.68 GB")
    mixed = 1.2 if given["enable_mixed_chunk"] == "True" else 1.0
    speed = lookup() * mixed * float(own("FAST", "1")) * noise()
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", int(given["port"])))
    listener.listen(16)
    if fault != "never ready":
        say("The server is fired up and ready to roll!")
    while True:
        connection, _ = listener.accept()
        with connection:
            request = connection.recv(65536).decode("latin1").split(" ")
            status, answer = respond(request[1] if len(request) > 1 else "", fault, arguments, speed)
            body = json.dumps(answer).encode()
            head = f"HTTP/1.1 {status} x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            connection.sendall(head.encode() + body)


def respond(path: str, fault: str, arguments: dict[str, object], speed: float) -> tuple[int, object]:
    if path == "/health":
        return (503 if fault == "never ready" else 200), {}
    if path == "/server_info":
        state = {"effective_max_running_requests_per_dp": 48}
        kv = int(own("KV", "100000"))
        return 200, {**arguments, "max_total_num_tokens": kv, "version": "0.5.23", "internal_states": [state]}
    if path == "/v1/models":
        return 200, {"data": [{"id": "made-up/moe", "max_model_len": 4096}]}
    if path.startswith("/pass"):
        return one_pass(int(path.partition("=")[2]), fault, speed)
    return 404, {}


def one_pass(requests: int, fault: str, speed: float) -> tuple[int, object]:
    if fault == "dies under load":
        say("Scheduler hit an exception: CUDA error: an illegal memory access was encountered")
        os._exit(1)
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "answers 500":
        return 500, {}
    time.sleep(3 if fault == "hangs" else float(own("SLOW", "0")))
    completed = requests // 2 if fault == "loses requests" else requests
    seconds = requests * 0.02 / speed
    answer = {"requested": requests, "completed": completed, "seconds": seconds, "tokens": completed * 16}
    answer |= {"ttft": 100.0 / speed, "itl": 10.0 / speed}
    if fault == "infinity":
        answer["seconds"] = float("inf")
    return 200, answer


if __name__ == "__main__":
    main()
