"""``tracer compare``: two or three traces side by side, as text, JSON or a screen."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tracer.cli.command import Command
from tracer.cli.stdout import has_bars, has_screen, width
from tracer.cli.target_state import is_trace, state_of

if TYPE_CHECKING:
    from tracer.analysis.compare import Comparison, Trace
    from tracer.state.trace_state import TraceState

PERCENTILES = ("p50", "p95", "p99")
"""As `analysis.compare.result.PERCENTILES`, here so that --help need not load numpy."""
MATCHES = ("length", "work", "none")
"""As `analysis.compare.cells.MATCHES`."""


def run(options: argparse.Namespace) -> int:
    """Put traces side by side and name the stage that explains what changed."""
    import json

    from tracer.analysis.compare import compare as compared
    from tracer.export.compare_doc import document
    from tracer.export.compare_text import compare_text
    from tracer.transport.targets import TargetError

    targets: list[str] = options.targets
    checks = [_check(text) for text in options.fail_on]
    if options.screen and not has_screen():
        raise TargetError("no terminal to show a screen in; without --screen it is printed")
    states = [_state(target) for target in targets]
    traces = _traces(targets, states)
    if options.screen:
        from tracer.tui.comparing import show

        return show(traces, states[-1], percentile=options.percentile, match=options.match)
    comparison = compared(traces, percentile=options.percentile, match=options.match)
    if options.json:
        print(json.dumps(document(comparison), indent=2))
    else:
        print(compare_text(comparison, width=width(), unicode=has_bars()).rstrip("\n"))
    return _failed(comparison, checks)


def _traces(targets: Sequence[str], states: Sequence[TraceState]) -> list[Trace]:
    """Each with a name by which it can be told from the others."""
    from tracer.analysis.compare import trace_of_state

    short = [Path(target).name if is_trace(target) else target for target in targets]
    names = short if len(set(short)) == len(short) else list(targets)
    if len(set(names)) < len(names):
        names = [f"{name} ({number})" for number, name in enumerate(short, 1)]
    return [trace_of_state(name, state) for name, state in zip(names, states, strict=True)]


def _state(target: str) -> TraceState:
    """The state of a target with all of its requests. Raises what `state_of` raises."""
    if not is_trace(target):
        return state_of(target)
    from tracer.analysis.compare import KEEP
    from tracer.replay.cursor import load

    return load(target, keep_finished=KEEP)


def _check(text: str) -> tuple[str, float]:
    """``decode=5`` as the key of a row and a share. Raises AnalysisError."""
    from tracer.analysis.compare.rows import row_of
    from tracer.analysis.errors import AnalysisError

    name, separator, percent = text.partition("=")
    try:
        share = float(percent.strip().removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not separator or not 0 <= share < 1e6:
        raise AnalysisError(
            f"--fail-on wants a stage or timer and per cent, such as decode=5, not {text[:40]!r}"
        )
    return row_of(name).key, share


def _failed(comparison: Comparison, checks: Sequence[tuple[str, float]]) -> int:
    """1 when a check does not hold, each of which is told on stderr; one that cannot be decided
    does not hold."""
    from tracer.format.text import clean

    code = 0
    statistic = comparison.percentile
    for key, share in checks:
        for pair in comparison.pairs:
            change = pair.change(key, statistic)
            name = clean(comparison.columns[pair.after].name)
            if change.differs is None:
                reason = f"cannot be checked: {change.why or 'not measured'}"
            elif (
                change.differs
                and (change.difference or 0.0) > 0
                and (change.relative or 0.0) > share
            ):
                reason = f"rose {change.relative:.1%}, {share:.0%} is allowed"
            else:
                continue
            print(f"tracer compare: {key} {statistic} of {name} {reason}", file=sys.stderr)
            code = 1
    return code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "targets",
        nargs="+",
        action=_Targets,
        metavar="FILE|TARGET",
        help="two or three recorded traces, pids, or names as in tracer attach --list; the first "
        "one is "
        "what the others are compared with",
    )
    parser.add_argument(
        "--percentile", choices=PERCENTILES, default="p50", help="which figure (default p50)"
    )
    parser.add_argument(
        "--match",
        choices=MATCHES,
        default="length",
        help="which requests are held against each other: of the same prompt and output length "
        "(default); "
        "of the same computed tokens as well (work): what a prefix cache saves is no difference "
        "then; or all (none)",
    )
    parser.add_argument("--json", action="store_true", help="as JSON on stdout")
    parser.add_argument(
        "--screen",
        action="store_true",
        help="in the screens of this tool, to look around in; without it the comparison is "
        "printed, on a "
        "terminal as well as into a pipe",
    )
    parser.add_argument(
        "--fail-on",
        action="append",
        default=[],
        metavar="ROW=PERCENT",
        help="exit with 1 when a stage or timer (e2e, ttft, queue, prefill_time, tpot, itl) got "
        "slower "
        "by more than so many per cent, beyond noise, or cannot be compared; may be "
        "repeated",
    )


class _Targets(argparse.Action):
    """Two or three of them."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        given = list(values) if isinstance(values, list) else []
        if not 2 <= len(given) <= 3:
            parser.error(f"two or three traces are compared, not {len(given)}")
        setattr(namespace, self.dest, given)


COMMAND = Command(
    "compare",
    "put traces side by side and name the stage that explains what changed",
    "  tracer compare before.trace after.trace\n"
    "  tracer compare cold.trace warm.trace loaded.trace --percentile p95\n"
    "  tracer compare good.trace new.trace --fail-on ttft=10 --fail-on decode=5\n"
    "  tracer compare before.trace after.trace --screen    # look around in it\n"
    "  tracer compare before.trace 4711 --json | jq '.pairs[0].verdict'",
    add_arguments,
    run,
)
