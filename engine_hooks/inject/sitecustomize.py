"""Found by Python at start-up when `tracer run` puts this folder on PYTHONPATH: switches the hooks
on.

The program that is entered must never break: without tracer in its environment, one line on stderr
says so, and that is all. Another `sitecustomize` further down the path is run as well, as if this
one were not there.
"""

import os
import sys


def _run_the_next_one() -> None:
    import importlib.machinery

    here = os.path.dirname(os.path.abspath(__file__))
    rest = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        import importlib.util

        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("TRACER") == "1":
    try:
        from engine_hooks.inject import install
    except ImportError as error:
        if os.environ.get("TRACER_QUIET") != "1":
            sys.stderr.write(
                f"tracer: not installed in {sys.executable} ({error}): this process is not traced\n"
            )
    else:
        try:
            install()
        except Exception as error:
            sys.stderr.write(f"tracer: hooks are off: {type(error).__name__}: {error}\n")

_run_the_next_one()
