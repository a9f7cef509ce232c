"""What `make demo` runs: the whole server on the small model that ships with the project.

A router, a prefill worker on a mesh of two fake CPU devices and a decode worker on another two; one completion is
streamed, and all of it stopped.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import qwenjax

_PROMPT = "The king went up to the city, and"
_TOKENS = 120
_READY = re.compile(r"qwenjax: serving \S+ on (\S+)/v1\n")


def shipped(name: str) -> Path:
    """A file or folder of configs/: beside the package in a checkout, inside it in a wheel.

    Raises FileNotFoundError where the installation lacks it.
    """
    package = Path(qwenjax.__file__).parent
    for path in (package.parent / "configs" / name, package / "configs" / name):
        if path.exists():
            return path
    raise FileNotFoundError(f"configs/{name} is neither beside nor in {package}; install qwenjax anew")


def main() -> int:
    command = [sys.executable, "-m", "qwenjax_serving.cli", "serve", str(shipped("tiny")), "--port", "0"]
    command += ["--config", str(shipped("deployments/demo.toml")), "--served-model-name", "tiny"]
    print("Starting a router, a prefill worker and a decode worker", file=sys.stderr)
    start = time.monotonic()
    # CPU even where there is a GPU: what the demo shows is how the parts play together.
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    try:
        assert server.stdout is not None
        ready = _READY.fullmatch(server.stdout.readline())
        if ready is None:
            return server.wait() or 1
        print(f"Ready after {time.monotonic() - start:.0f} s: {ready[1]}/v1\n", file=sys.stderr)
        first, rest = _complete(ready[1])
        print(f"\n\n{_figures(ready[1], first, rest)}", file=sys.stderr)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
    return server.returncode


def _complete(url: str) -> tuple[float, float]:
    """Streams the completion to the terminal; seconds to its first token, and from there to the last."""
    body = {"model": "tiny", "prompt": _PROMPT, "max_tokens": _TOKENS, "temperature": 0, "stream": True}
    data = json.dumps(body | {"ignore_eos": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    print(_PROMPT, end="", flush=True)
    start, first = time.monotonic(), None
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                first = first or time.monotonic()
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                print(event["choices"][0]["text"], end="", flush=True)
    end = time.monotonic()
    assert first is not None
    return first - start, end - first


def _figures(url: str, first: float, rest: float) -> str:
    time.sleep(1.0)  # workers tell the router of themselves twice a second
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        metrics = answer.read().decode()

    def total(name: str) -> float:
        found = re.findall(rf"^qwenjax:{name}_total\{{.*\}} (\S+)$", metrics, re.MULTILINE)
        return sum(map(float, found))

    drafted, accepted = total("spec_decode_num_draft_tokens"), total("spec_decode_num_accepted_tokens")
    return (
        f"Time to first token {1000 * first:.0f} ms, then {(_TOKENS - 1) / rest:.0f} tokens/s; "
        f"{total('kv_transfer_bytes') / 1024:.0f} KiB of pages from prefill to decode; "
        f"{accepted / drafted:.0%} of drafts accepted"
    )


if __name__ == "__main__":
    sys.exit(main())
