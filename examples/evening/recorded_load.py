#!/usr/bin/env python3
r"""The load generator of the recorded server: asks it for one pass and writes what it answers as JSON.

    python3 recorded_load.py --url http://127.0.0.1:30000 --requests 512 --concurrency 48 \
        --input-tokens 1024 --output-tokens 256 --result out.json

No request is sent one by one: the server answers with the times that the pass would have taken.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Ask for a pass; 1 when the server gives none."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", required=True)
    for name in ("requests", "concurrency", "input-tokens", "output-tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0, help="of a real generator; it changes nothing here")
    parser.add_argument("--result", type=Path, required=True)
    own = parser.parse_args(arguments)
    wanted = {
        "requests": own.requests,
        "concurrency": own.concurrency,
        "input_tokens": own.input_tokens,
        "output_tokens": own.output_tokens,
    }
    request = urllib.request.Request(
        f"{own.url.rstrip('/')}/recorded/pass",
        data=json.dumps(wanted).encode(),
        headers={"Content-Type": "application/json"},
    )
    # The machine's proxies are not for a server on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as response:
            answer = json.loads(response.read(1 << 20))
    except (OSError, ValueError, urllib.error.URLError) as error:
        print(f"the server gave no pass: {error}", file=sys.stderr)  # noqa: T201
        return 1
    own.result.write_text(json.dumps(answer, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
