"""``tracer compare``: two or three traces side by side, as text, JSON or a screen."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tracer.analysis.compare import KEEP, Comparison, Trace, trace_of_state
from tracer.analysis.compare import compare as compared
from tracer.analysis.compare.cells import MATCHES
from tracer.analysis.compare.result import PERCENTILES
from tracer.analysis.compare.rows import row_of
from tracer.analysis.errors import AnalysisError
from tracer.cli import arguments
from tracer.cli.arguments import flag, option
from tracer.cli.output import has_bars, print_json, print_text, require_screen, width
from tracer.cli.target_state import is_trace, state_of
from tracer.export.compare_doc import document
from tracer.export.compare_text import compare_text
from tracer.format.text import clean
from tracer.replay.cursor import load
from tracer.state.trace_state import TraceState

EXAMPLES = """\
  tracer compare before.trace after.trace
  tracer compare cold.trace warm.trace loaded.trace --percentile p95
  tracer compare good.trace new.trace --fail-on ttft=10 --fail-on decode=5
  tracer compare before.trace after.trace --screen    # look around in it
  tracer compare before.trace 4711 --json | jq '.pairs[0].verdict'"""


def run(options: argparse.Namespace) -> int:
    targets: list[str] = options.targets
    checks = [_check(text) for text in options.fail_on]
    if options.screen:
        require_screen("no terminal to show a screen in; without --screen it is printed")
    states = [_state(target) for target in targets]
    traces = _traces(targets, states)
    if options.screen:
        from tracer.tui.standalone import show_comparison

        return show_comparison(
            traces, states[-1], percentile=options.percentile, match=options.match
        )
    comparison = compared(traces, percentile=options.percentile, match=options.match)
    if options.json:
        print_json(document(comparison))
    else:
        print_text(compare_text(comparison, width=width(), unicode=has_bars()))
    failures = list(_failures(comparison, checks))
    for failure in failures:
        print(f"tracer compare: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _traces(targets: Sequence[str], states: Sequence[TraceState]) -> list[Trace]:
    short = [Path(target).name if is_trace(target) else target for target in targets]
    names = short if len(set(short)) == len(short) else list(targets)
    if len(set(names)) < len(names):
        names = [f"{name} ({number})" for number, name in enumerate(short, 1)]
    return [trace_of_state(name, state) for name, state in zip(names, states, strict=True)]


def _state(target: str) -> TraceState:
    """Return the state of a target with all of its requests. Raises what `state_of` raises."""
    return load(target, keep_finished=KEEP) if is_trace(target) else state_of(target)


def _check(text: str) -> tuple[str, float]:
    """Return ``decode=5`` as the key of a row and a share. Raises AnalysisError."""
    name, separator, percent = text.partition("=")
    try:
        share = float(percent.strip().removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not separator or not 0 <= share < 1e6:
        raise AnalysisError(
            f"--fail-on {text[:40]!r}: must be a stage or timer and per cent, such as decode=5"
        )
    return row_of(name).key, share


def _failures(comparison: Comparison, checks: Sequence[tuple[str, float]]) -> Iterator[str]:
    """Yield the checks that do not hold; one that cannot be decided does not."""
    statistic = comparison.percentile
    for key, share in checks:
        for pair in comparison.pairs:
            change = pair.change(key, statistic)
            what = f"{key} {statistic} of {clean(comparison.columns[pair.after].name)}"
            if change.differs is None:
                yield f"{what} cannot be checked: {change.why or 'not measured'}"
                continue
            rose = change.differs and (change.difference or 0.0) > 0
            if rose and (change.relative or 0.0) > share:
                yield f"{what} rose {change.relative:.1%}, {share:.0%} is allowed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(
        parser, "targets", "FILE|TARGET",
        "two or three recorded traces, pids, or names as in tracer attach --list; the others are "
        "compared with the first",
        nargs="+", action=_Targets,
    )  # fmt: skip
    parser.add_argument(
        "--percentile", choices=PERCENTILES, default="p50", help="which figure (default p50)"
    )
    parser.add_argument(
        "--match", choices=MATCHES, default="length",
        help="which requests are compared: of the same prompt and output length (default); of the "
        "same computed tokens as well (work), so that tokens saved by a prefix cache make no "
        "difference; or all (none)",
    )  # fmt: skip
    arguments.add_json(parser)
    flag(parser, "--screen", "show the comparison in the screens of this tool, do not print it")
    option(
        parser, "--fail-on", "ROW=PERCENT",
        "exit with 1 when a stage or timer (e2e, ttft, queue, prefill_time, tpot, itl) got slower "
        "by more than so many per cent, beyond noise, or cannot be compared; may be repeated",
        action="append", default=[],
    )  # fmt: skip


class _Targets(argparse.Action):
    """Two or three targets."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace,
                 values: object, option_string: str | None = None) -> None:  # fmt: skip
        given = list(values) if isinstance(values, list) else []
        if not 2 <= len(given) <= 3:
            parser.error(f"two or three traces are compared, not {len(given)}")
        setattr(namespace, self.dest, given)
