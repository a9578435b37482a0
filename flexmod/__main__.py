"""`python -m flexmod`: the command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from flexmod import __version__, bench, demo
from flexmod.errors import FlexmodError

COMMANDS: dict[str, Any] = {"demo": demo, "bench": bench}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 on success, 2 for wrong arguments. Without a command: print the help."""
    parser = argparse.ArgumentParser(prog="python -m flexmod", description="flexmod commands")
    parser.add_argument("--version", action="version", version=f"flexmod {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        command.add_arguments(
            commands.add_parser(name, help=command.SUMMARY, description=command.SUMMARY)
        )
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        return COMMANDS[options.command].run(options)
    except FlexmodError as error:
        print(f"flexmod {options.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read the output has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
