"""``tracer budget``: the model's figures printed or on a screen, calibrated by a recording, or what
would change if."""

from __future__ import annotations

import argparse
from typing import Any

from engine_hooks.protocol.block_file import why
from tracer.analysis.beside.observed import Observed, observe
from tracer.analysis.budget.options import budget_of
from tracer.analysis.fit.calibration import keep_fit, keep_processor
from tracer.analysis.fit.fit import Fit, fit_trace
from tracer.analysis.model.devices import device, this_cpu
from tracer.analysis.whatif.whatif import parse_changes, what_if
from tracer.cli import arguments
from tracer.cli.commands import UsageError
from tracer.cli.output import has_bars, has_screen, print_json, print_text, require_screen, width
from tracer.cli.status_line import report
from tracer.cli.target_state import observed
from tracer.cli.workload_options import add_workload_options, all_default
from tracer.export.budget_text import budget_document, budget_text
from tracer.export.fit_text import fit_document, fit_text
from tracer.export.whatif_text import whatif_document, whatif_text

EXAMPLES = """\
  tracer budget --model llama-3.1-8b --device h100-sxm --prompt 2000 --output 300
  tracer budget --model ./my-model --device cpu --batch 8 --json
  tracer budget --screen            # sliders; also what a terminal gets without any flag
  tracer budget --journey           # one request, stage by stage, for an audience
  tracer budget --fit slow.trace    # which shares of the device the engine reached
  tracer budget --what-if slow.trace prefix-cache=on max-num-seqs=64"""


def run(options: argparse.Namespace) -> int:
    ways = [name for name in ("fit", "what_if", "screen", "journey") if getattr(options, name)]
    if len(ways) > 1:
        one, other = (name.replace("_", "-") for name in ways[:2])
        raise UsageError(f"--{one} and --{other} cannot be used together")
    if options.fit:
        return _fit(options)
    if options.what_if:
        return _what_if(options)
    on_screen = options.screen or options.journey
    if on_screen and options.json:
        raise UsageError(f"--{ways[0]} opens a screen: it cannot be printed as JSON")
    if on_screen:
        require_screen(f"no terminal to draw on; without --{ways[0]} the budget is printed")
    on_screen = on_screen or (all_default(options) and not options.json and has_screen())
    made = budget_of(options)
    if made.device.name == "cpu":
        _keep_processor()
    if on_screen:
        from tracer.cli.screen import show_budget

        return show_budget(made, journey=options.journey)
    _print(options, budget_text(made, width=width(), unicode=has_bars()), budget_document(made))
    return 0


def _keep_processor() -> None:
    try:
        keep_processor(this_cpu())
    except OSError as error:
        report(f"the measurement of this processor is not kept: {why(error)}")


def _fit(options: argparse.Namespace) -> int:
    """Estimate the engine's shares of its device from a recording, and keep them for the expected
    values."""
    seen, found = _fitted(options, options.fit)
    kept = ""
    try:
        kept = str(keep_fit(seen.engine, found))
    except OSError as error:
        report(f"the fit is not kept for expected values: {why(error)}")
    if found.device.name == "cpu":
        _keep_processor()
    text = fit_text(found, seen, kept=kept, width=width(), unicode=has_bars())
    _print(options, text, fit_document(found, seen))
    return 0


def _what_if(options: argparse.Namespace) -> int:
    target, *words = options.what_if
    if not words:
        raise UsageError(
            "--what-if needs a change after FILE, for example: prefix-cache=on max-num-seqs=64 "
            "rate×2"
        )
    changes = parse_changes(" ".join(words))
    seen, found = _fitted(options, target)
    result = what_if(seen, changes, fitted=found)
    text = whatif_text(result, width=width(), unicode=has_bars())
    _print(options, text, whatif_document(result))
    return 0


def _fitted(options: argparse.Namespace, target: str) -> tuple[Observed, Fit]:
    seen = observe(observed(target))
    return seen, fit_trace(seen, device=device(options.device) if options.device else None)


def _print(options: argparse.Namespace, text: str, document: dict[str, Any]) -> None:
    if options.json:
        print_json(document)
    else:
        print_text(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload_options(parser)
    arguments.add_json(parser)
