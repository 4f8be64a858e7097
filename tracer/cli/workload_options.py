"""The flags of ``tracer budget``: model, device and workload; `analysis.budget.options` reads them
back."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from tracer.analysis.budget.options import DEVICE, MODEL
from tracer.analysis.budget.workload import MOST_SEQUENCES, MOST_TOKENS
from tracer.analysis.model.costs import Counting
from tracer.analysis.model.devices import DEVICES
from tracer.analysis.model.presets import PRESETS
from tracer.analysis.model.roofline import Roofline
from tracer.analysis.model.shape import BITS


def _whole(least: int, most: int) -> Callable[[str], int]:
    """Return a parser of whole numbers between two bounds; ``32k``, ``32_000`` and ``32,000`` are
    numbers too."""

    def parse(text: str) -> int:
        plain = text.strip().lower().replace(",", "").replace("_", "")
        scale = 1024 if plain.endswith("k") else 1
        digits = plain.removesuffix("k")
        number = digits.isascii() and digits.isdigit() and len(digits) < 16
        value = int(digits) * scale if number else -1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r}: must be a whole number from {least:,} to {most:,}"
            )
        return value

    return parse


def _number(least: float, most: float, *, open_below: bool = False) -> Callable[[str], float]:
    """Return a parser of numbers between two bounds."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or (open_below and value == least):
            bounds = f"above {least:g} and at most" if open_below else f"{least:g} to"
            raise argparse.ArgumentTypeError(f"{text[:40]!r}: must be {bounds} {most:g}")
        return value

    return parse


_TOKENS, _SOME_TOKENS = _whole(1, MOST_TOKENS), _whole(0, MOST_TOKENS)
_SHARE, _AMOUNT = _number(0, 1, open_below=True), _number(0, 1e6)
_MODEL_HELP = f"a preset ({', '.join(sorted(PRESETS))}), or a folder or file with a config.json "
_ROOFLINE_HELP = (
    "how arithmetic and memory time combine: 2-norm, the longer one, their sum, or prefill by the "
    "first and decode by the second alone (default smooth; sum on a cpu, which does one after the "
    "other)"
)
_FIT_HELP = (
    "calibrate: MFU, MBU and host overhead of the engine in a recorded trace, and how well that "
    "holds for steps it has not seen; --device where the trace does not name one"
)
_WHAT_IF_HELP = (
    "replay a recorded trace with its settings changed: prefix-cache=on|off chunked=512|off "
    "max-num-seqs=64 batch×2 kv-blocks=N rate×2 output×0.5 device=h100-sxm"
)
_VALUES = {
    "workload": (
        ("--model", str, None, "NAME|FOLDER|FILE", f"{_MODEL_HELP}(default {MODEL})"),
        ("--device", str, None, "NAME",
         f"{', '.join(DEVICES)}, or cpu (measured here) (default {DEVICE})"),
        ("--prompt", _TOKENS, 2000, "N", "prompt tokens (default 2000)"),
        ("--cached", _SOME_TOKENS, 0, "N", "prompt tokens found in the prefix cache (default 0)"),
        ("--output", _TOKENS, 300, "N", "output tokens (default 300)"),
        ("--batch", _whole(1, MOST_SEQUENCES), 1, "N",
         "sequences in a step, this one included (default 1)"),
        ("--context", _SOME_TOKENS, 0, "N", "tokens of context of each other sequence (default 0)"),
        ("--chunk", _SOME_TOKENS, 0, "N", "tokens a step, for chunked prefill (default: all)"),
        ("--draft", _whole(0, 64), 0, "N", "speculative decoding: tokens proposed a step"),
        ("--accept", _number(0, 1), 0.7, "P", "… each accepted with this probability (0.7)"),
        ("--draft-cost", _number(0, 10), 0.05, "C", "… each at this share of a step (0.05)"),
    ),
    "engine": (
        ("--tp", _whole(1, 64), 1, "N", "devices that share each layer (default 1)"),
        ("--mfu", _SHARE, None, "S",
         "share of the peak FLOP/s that is reached (default: the device's, 0.4)"),
        ("--mbu", _SHARE, None, "S",
         "share of the bandwidth that is reached (default: the device's, 0.8)"),
        ("--host-ms", _AMOUNT, 0.0, "MS", "host overhead of a step (default 0)"),
        ("--host-us", _AMOUNT, 0.0, "US", "… and for each sequence in it (default 0)"),
        ("--front-end", _AMOUNT, None, "MS", "CPU time of a 2,000-token request (default 2.6)"),
    ),
    "capacity": (
        ("--kv-pool", _AMOUNT, None, "GIB",
         "memory for the KV cache (default: what the device has left)"),
        ("--longest", _TOKENS, 8192, "N", "tokens of the worst case (default 8192)"),
        ("--mean-tokens", _TOKENS, None, "N",
         "tokens that users hold on average (default prompt + output)"),
        ("--block-size", _whole(1, 65_536), 16, "N", "tokens of a KV block (default 16)"),
    ),
}  # fmt: skip
"""Group → flag, type, default, metavar, help."""


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    """Add all flags of ``tracer budget`` but ``--json``."""
    groups = {title: parser.add_argument_group(title) for title in _VALUES}
    for title, rows in _VALUES.items():
        for flag, kind, default, metavar, text in rows:
            groups[title].add_argument(flag, type=kind, default=default, metavar=metavar, help=text)
    add = groups["engine"].add_argument
    dtypes = sorted(BITS)
    rooflines, counts = [each.value for each in Roofline], [each.value for each in Counting]
    add("--weights", choices=dtypes, metavar="DTYPE", help=f"weights as {', '.join(BITS)}")
    add("--kv-dtype", choices=dtypes, metavar="DTYPE", help="the KV cache in another dtype")
    add("--roofline", choices=rooflines, help=_ROOFLINE_HELP)
    count_help = "every weight for every token, or what kernels do (default textbook)"
    add("--count", choices=counts, default=Counting.TEXTBOOK.value, help=count_help)
    add("--ignore-kv", action="store_true", help="leave out reads of the KV cache")
    add = parser.add_argument_group("other modes").add_argument
    screen_help = "a screen with sliders; a terminal also gets it without any flag"
    add("--screen", action="store_true", help=screen_help)
    add("--journey", action="store_true", help="a screen, stage by stage, for an audience")
    add("--fit", metavar="FILE", help=_FIT_HELP)
    add("--what-if", nargs="+", metavar=("FILE", "CHANGE"), help=_WHAT_IF_HELP)


def all_default(options: argparse.Namespace) -> bool:
    """Return whether no flag of `add_workload_options` was given."""
    parser = argparse.ArgumentParser()
    add_workload_options(parser)
    defaults = vars(parser.parse_args([]))
    return all(getattr(options, name) == value for name, value in defaults.items())
