"""``tracer budget``: the model's figures printed or on a screen, calibrated by a recording, or what
would change if.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from tracer.cli.command import Command
from tracer.cli.stdout import has_bars, has_screen, width

if TYPE_CHECKING:
    from tracer.analysis.beside.observed import Observed


def run(options: argparse.Namespace) -> int:
    """Do what the flags of ``tracer budget`` ask for; the exit code."""
    from tracer.analysis.budget.options import asks_for_nothing, budget_of
    from tracer.analysis.errors import AnalysisError

    ways = [name for name in ("fit", "what_if", "screen", "journey") if getattr(options, name)]
    if len(ways) > 1:
        one, other = (name.replace("_", "-") for name in ways[:2])
        raise AnalysisError(f"--{one} and --{other} cannot be asked for together")
    if options.fit:
        return _fit(options)
    if options.what_if:
        return _what_if(options)
    on_screen = options.screen or options.journey
    if options.json and on_screen:
        raise AnalysisError(f"--{ways[0]} opens a screen: it cannot be printed as JSON")
    if on_screen and not has_screen():
        raise AnalysisError(f"no terminal to draw on; without --{ways[0]} the budget is printed")
    on_screen = on_screen or (asks_for_nothing(options) and not options.json and has_screen())
    made = budget_of(options)
    if made.device.name == "cpu":
        _keep_processor()
    if on_screen:
        from tracer.cli.screen import show_budget

        return show_budget(made, journey=options.journey)
    from tracer.export.budget_text import budget_document, budget_text

    _print(options, budget_text(made, width=width(), unicode=has_bars()), budget_document(made))
    return 0


def _keep_processor() -> None:
    """Let the screens know what was just measured."""
    from tracer.analysis.fit.calibration import keep_processor
    from tracer.analysis.model.devices import this_cpu

    try:
        keep_processor(this_cpu())
    except OSError as error:
        print(
            f"tracer: what was measured of this processor is not kept: {error.strerror}",
            file=sys.stderr,
        )


def _observed(options: argparse.Namespace, target: str) -> Observed:
    from tracer.analysis.beside.observed import observe
    from tracer.cli.target_state import observed

    return observe(observed(target))


def _fit(options: argparse.Namespace) -> int:
    """Estimate the engine's shares of its device from a recording, and keep them for the expected
    values."""
    from tracer.analysis.fit.calibration import keep_fit
    from tracer.analysis.fit.fit import fit_trace
    from tracer.analysis.model.devices import device
    from tracer.export.fit_text import fit_document, fit_text

    seen = _observed(options, options.fit)
    found = fit_trace(seen, device=device(options.device) if options.device else None)
    kept = None
    try:
        kept = keep_fit(seen.engine, found)
    except OSError as error:
        print(f"tracer: the fit is not kept for expected values: {error.strerror}", file=sys.stderr)
    if found.device.name == "cpu":
        _keep_processor()
    text = fit_text(found, seen, kept=str(kept) if kept else "", width=width(), unicode=has_bars())
    _print(options, text, fit_document(found, seen))
    return 0


def _what_if(options: argparse.Namespace) -> int:
    """Replay a recording under changed settings."""
    from tracer.analysis.errors import AnalysisError
    from tracer.analysis.fit.fit import fit_trace
    from tracer.analysis.model.devices import device
    from tracer.analysis.whatif.whatif import parse_changes, what_if
    from tracer.export.whatif_text import whatif_document, whatif_text

    target, *words = options.what_if
    if not words:
        raise AnalysisError(
            "--what-if needs a change after FILE, for example: prefix-cache=on max-num-seqs=64 "
            "rate×2"
        )
    changes = parse_changes(" ".join(words))
    seen = _observed(options, target)
    found = fit_trace(seen, device=device(options.device) if options.device else None)
    told = what_if(seen, changes, fitted=found)
    _print(options, whatif_text(told, width=width(), unicode=has_bars()), whatif_document(told))
    return 0


def _print(options: argparse.Namespace, text: str, document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=2) if options.json else text.rstrip("\n"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add model, device and load, and what is asked of them."""
    from tracer.analysis.budget.options import add_arguments as add_budget_arguments

    add_budget_arguments(parser)
    parser.add_argument("--json", action="store_true", help="as JSON on stdout")


COMMAND = Command(
    "budget",
    "what the twelve stages must take, by model, device and load",
    "  tracer budget --model llama-3.1-8b --device h100-sxm --prompt 2000 --output 300\n"
    "  tracer budget --model ./my-model --device cpu --batch 8 --json\n"
    "  tracer budget --screen            # sliders; also what a terminal gets without any flag\n"
    "  tracer budget --journey           # one request, stage by stage, for an audience\n"
    "  tracer budget --fit slow.trace    # which shares of the device the engine reached\n"
    "  tracer budget --what-if slow.trace prefix-cache=on max-num-seqs=64",
    add_arguments,
    run,
)
