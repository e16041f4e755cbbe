"""The command line: `python -m cluster serve` brings the whole application up on this machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cluster.bring_up import CPU_CONFIG, serve_until_interrupted


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="start a local Ray, deploy, stay until Ctrl-C, shut everything down")
    serve.add_argument("--config", type=Path, default=CPU_CONFIG, help="Serve config (default: %(default)s)")
    serve.add_argument("--model", help="a local Hugging Face folder to serve instead of the config's target")
    serve.add_argument("--drafter", help="a drafter folder to use instead of the config's")
    serve.add_argument("--port", type=int, help="port instead of the config's")
    key = commands.add_parser("new-key", help="make an API key and print it with the settings line that admits it")
    key.add_argument("--tiers", nargs="+", default=["default"], help="tiers the key may ask for")
    options = parser.parse_args(arguments)
    if options.command == "new-key":
        from deployments.api_keys import generate_key, key_digest

        made = generate_key()
        print(f"key (shown once): {made}\nsettings:\n  keys:\n    {key_digest(made)}: [{', '.join(options.tiers)}]")
        return 0
    return serve_until_interrupted(options.config, options.model, options.drafter, options.port)


if __name__ == "__main__":
    sys.exit(main())
