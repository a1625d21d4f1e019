"""`python -m hf_paged bench`: what the cache brings on your own model and machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m hf_paged", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    from .bench import cli  # after the parser exists, so that --help needs no model code

    cli.add_arguments(commands.add_parser("bench", help="measure the default cache against hf_paged, side by side"))
    options = parser.parse_args(arguments)
    return cli.run(options)


if __name__ == "__main__":
    sys.exit(main())
