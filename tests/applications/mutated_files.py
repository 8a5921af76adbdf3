"""Config files with bytes taken out, put in and doubled, and names that are none."""

from __future__ import annotations

import json
import random
import string
import unicodedata

UP = "E=128,N=192,device_name=NVIDIA_H200.json"
DOWN = "E=128,N=192,device_name=NVIDIA_H200_down.json"
ENTRY = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 64,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 3,
}
KEYS = ("1", "2", "4", "8", "16", "32", "64", "128", "256", "512", "1024", "2048", "4096")
GOOD = dict.fromkeys(KEYS, ENTRY)
# Texts and names that mutation starts from, and bytes that hurt parsers.
_SEEDS = (
    json.dumps(GOOD),
    json.dumps(GOOD | {"triton_version": "3.8.0"}, indent=4),
    json.dumps({"1": ENTRY | {"USE_TMA": True, "SPLIT_K": 1, "waves_per_eu": 2}}),
    json.dumps({"8": ENTRY, "64": ENTRY | {"BLOCK_SIZE_K": 256, "num_stages": 9}}),
)
_NAMES = (
    UP,
    DOWN,
    "E=8,N=64,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json",
    "E=8,N=64,device_name=AMD_Instinct_MI300X,dtype=int4_w4a16.json",
)
_HURTS = (
    *(
        '"',
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "\\",
        "\\u0000",
        "\\ud800",
        "NaN",
        "-Infinity",
        "1e999",
        "-1",
        "0",
        "0.5",
    ),
    *(
        "99999999999999999999",
        "true",
        "null",
        "\x00",
        "\x1b[2J",
        "\ufeff",
        "\u202e",
        "\t",
        "\r\n",
        '"8.0"',
        "_",
    ),
    *("BLOCK_SIZE_M", "num_stages", "[" * 2000, '{"a":' * 300, "1" * 6000, "\ud7ff", "'", "//", "/*", "#"),
)


def mutated(rng: random.Random) -> tuple[str, bytes]:
    """A name and a content."""
    text = rng.choice(_SEEDS)
    for _ in range(rng.randint(1, 5)):
        at, until = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        kind = rng.random()
        if kind < 0.35:
            text = text[:at] + rng.choice(_HURTS) + text[at:]
        elif kind < 0.6:
            text = text[:at] + rng.choice(_HURTS) + text[min(until, at + 8) :]
        elif kind < 0.75:
            text = text[:at] + text[until:]
        elif kind < 0.9:
            text = text[:at] + text[at:until] * 2 + text[until:]
        else:
            text = text[:at] + rng.choice(string.printable) + text[at + 1 :]
    content = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        spot = rng.randrange(len(content) + 1)
        content = content[:spot] + bytes(rng.randrange(256) for _ in range(4)) + content[spot:]
    name = rng.choice(_NAMES)
    if rng.random() < 0.2:
        spot = rng.randrange(len(name))
        name = (
            name[:spot]
            + rng.choice((*string.printable, "..", "\u202e", "\x00"))
            + name[spot + rng.randint(0, 2) :]
        )
    return name, content


def is_safe(text: str) -> bool:
    """Nothing in it steers a terminal."""
    return not any(unicodedata.category(character) in {"Cc", "Cf", "Cs", "Zl", "Zp"} for character in text)
