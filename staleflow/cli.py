"""The command ``staleflow``: each subcommand is a module that adds itself to the parser."""

import argparse
import sys
from collections.abc import Sequence

from staleflow.bench import command as bench
from staleflow.errors import StaleflowError
from staleflow.explain import command as explain
from staleflow.plot import command as plot

COMMANDS = (bench, explain, plot)
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand that the arguments name; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="staleflow", description="Asynchronous RL post-training of language models inside a hard staleness bound."
    )
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_command(subparsers)
    parsed = parser.parse_args(arguments)
    try:
        exit_code: int = parsed.run(parsed)
        sys.stdout.flush()
    except StaleflowError as error:
        print(f"staleflow: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        # What was to be printed or written has no room, or nobody reads it any more.
        print(f"staleflow: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return exit_code
