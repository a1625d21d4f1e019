"""`python -m hf_paged bench`: what the cache brings on your own model and machine; `doctor`: which kernels serve there."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import doctor
from .bench import cli


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m hf_paged", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module, text in (
        ("bench", cli, "measure the default cache against hf_paged, side by side"),
        ("doctor", doctor, "say which kernels serve here, and what would give better ones"),
    ):
        command = commands.add_parser(name, help=text)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
