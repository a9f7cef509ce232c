"""The `qwenjax` command."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from qwenjax_serving.version import installed_version

# Modules are imported when their command is run or asked for help: `qwenjax --help` does not wait for JAX.
_COMMANDS = {
    "generate": "generate text from a checkpoint, streaming to the terminal",
    "logits": "print the most likely next tokens after a prompt",
    "convert": "write a checkpoint anew in a quantised format",
    "eval": "measure what number formats cost a model on a text",
    "train": "train a small model, or a multi-token-prediction head for any",
    "serve": "serve a model over HTTP, as OpenAI's API",
    "bench": "measure an OpenAI-compatible server under a load",
}

# The packages that only some commands need, by the extra that brings them.
_EXTRAS = {
    "msgspec": "serve",
    "prometheus_client": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
    "zmq": "serve",
    "nixl": "disagg",
    "optax": "train",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status: 0, 2 for what the user can mend, 130 for Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    try:
        parsed = _parse(arguments, chosen)  # within the try: importing a command takes seconds, and Ctrl-C may come
        status = int(parsed.run(parsed))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("\nqwenjax: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `qwenjax … | head`
        # Python flushes standard output once more when it ends: into nothing, or that fails and is reported.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        needed = f"needs {package}: pip install 'qwenjax[{_EXTRAS[package]}]'"
        print(f"qwenjax {chosen}: error: {needed}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:  # ConfigError, CheckpointError and MeshError among them
        print(f"qwenjax {chosen}: error: {error}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """Takes options by their whole names alone, and says itself what it does not know: argparse leaves that to the
    outermost parser, whose usage shows none of a command's options."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown


def _parse(arguments: list[str], chosen: str | None) -> argparse.Namespace:
    parser = _Parser(prog="qwenjax", description="Serving Qwen3 mixture-of-experts models in JAX.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {installed_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in _COMMANDS.items():
        subparser = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == chosen:
            module = importlib.import_module(f"qwenjax_serving.commands.{name}")
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
