"""`python -m flexmod`: the command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from flexmod import __version__, demo
from flexmod.errors import FlexmodError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 on success, 2 for wrong arguments. Without a command: print the help."""
    parser = argparse.ArgumentParser(prog="python -m flexmod", description="flexmod commands")
    parser.add_argument("--version", action="version", version=f"flexmod {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    demo.add_arguments(commands.add_parser("demo", help=demo.SUMMARY, description=demo.SUMMARY))
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        return demo.run(options)
    except FlexmodError as error:
        print(f"flexmod demo: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read the output has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
