"""The command line: arguments in, exit codes out.

Exit codes: 0 done, 2 wrong usage or bad input with a one-line reason, 128 + n when signal n ended
us; `run` exits like the command that it ran.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

from engine_hooks.protocol.errors import UserError
from tracer.cli.commands import COMMANDS
from tracer.cli.parser import parser_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Raises SystemExit alone; with ``TRACER_DEBUG=1`` errors keep their traceback.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = parser_of(given[:1])
    if given and not given[0].startswith("-") and given[0] not in COMMANDS:
        parser.error(f"no command called {given[0][:40]}; commands: {', '.join(COMMANDS)}")
    options = parser.parse_args(given)
    if options.name is None:
        parser.print_help()
        return 2
    try:
        code = int(options.call(options))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of our output has gone; what is left in the buffer must not be tried again at
        # exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if os.environ.get("TRACER_DEBUG") == "1":
            raise
        known = isinstance(error, UserError | OSError)
        print(f"tracer {options.name}: {_reason(error, known)}", file=sys.stderr)
        return 2 if known else 1


def _reason(error: Exception, known: bool) -> str:
    from tracer.format.text import clean

    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        import warnings

        # an event loop that could not be made complains as it is cleared away
        sys.unraisablehook = lambda _: None
        warnings.simplefilter("ignore")
        return "no file descriptor is left: raise the limit (ulimit -n) or close what holds them"
    reason = " ".join(clean(str(error), keep_newlines=True).split()) or type(error).__name__
    return reason if known else f"{type(error).__name__}: {reason}"
