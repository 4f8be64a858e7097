"""The flags of ``tracer budget``, and the budget that they ask for."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Final

from tracer.analysis.budget.budget import Budget, budget
from tracer.analysis.budget.workload import MOST_SEQUENCES, MOST_TOKENS, Speculation, Workload
from tracer.analysis.errors import AnalysisError
from tracer.analysis.model.config import load_model
from tracer.analysis.model.costs import Counting
from tracer.analysis.model.devices import DEVICES, device
from tracer.analysis.model.efficiency import Efficiency, FrontEnd, usual_roofline
from tracer.analysis.model.presets import PRESETS
from tracer.analysis.model.roofline import Roofline
from tracer.analysis.model.shape import BITS

MODEL: Final = "llama-3.1-8b"
DEVICE: Final = "h100-sxm"
"""What is meant where nothing is said."""


def _whole(least: int, most: int) -> Callable[[str], int]:
    """A parser of whole numbers between two bounds; ``32k``, ``32_000`` and ``32,000`` are numbers
    too."""

    def parse(text: str) -> int:
        plain = text.strip().lower().replace(",", "").replace("_", "")
        scale = 1024 if plain.endswith("k") else 1
        digits = plain.removesuffix("k")
        value = (
            int(digits) * scale
            if digits.isascii() and digits.isdigit() and len(digits) < 16
            else -1
        )
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r} is no whole number between {least:,} and {most:,}"
            )
        return value

    return parse


def _number(least: float, most: float, *, open_below: bool = False) -> Callable[[str], float]:
    """A parser of numbers between two bounds."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or (open_below and value == least):
            above = "above" if open_below else "of at least"
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r} is no number {above} {least:g} and of at most {most:g}"
            )
        return value

    return parse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags but ``--json``'s like; `budget_of` reads them back."""
    tokens, none_or_more = _whole(1, MOST_TOKENS), _whole(0, MOST_TOKENS)
    share, factor = _number(0, 1, open_below=True), _number(0, 1e6)
    what = parser.add_argument_group("what is asked")
    add = what.add_argument
    add(
        "--model",
        metavar="NAME|FOLDER|FILE",
        help=(
            f"a preset ({', '.join(sorted(PRESETS))}), or a folder or file with a config.json "
            f"(default {MODEL})"
        ),
    )
    add(
        "--device",
        metavar="NAME",
        help=f"{', '.join(DEVICES)}, or cpu (measured here) (default {DEVICE})",
    )
    add("--prompt", type=tokens, default=2000, metavar="N", help="prompt tokens (default 2000)")
    add(
        "--cached",
        type=none_or_more,
        default=0,
        metavar="N",
        help="of them found in the prefix cache (default 0)",
    )
    add("--output", type=tokens, default=300, metavar="N", help="output tokens (default 300)")
    add(
        "--batch",
        type=_whole(1, MOST_SEQUENCES),
        default=1,
        metavar="N",
        help="sequences in a step, this one included (default 1)",
    )
    add(
        "--context",
        type=none_or_more,
        default=0,
        metavar="N",
        help="tokens of context of each other one (default 0)",
    )
    add(
        "--chunk",
        type=none_or_more,
        default=0,
        metavar="N",
        help="tokens a step, for chunked prefill (default: all)",
    )
    add(
        "--draft",
        type=_whole(0, 64),
        default=0,
        metavar="N",
        help="speculative decoding: tokens proposed a step",
    )
    add(
        "--accept",
        type=_number(0, 1),
        default=0.7,
        metavar="P",
        help="… each accepted with this probability (0.7)",
    )
    add(
        "--draft-cost",
        type=_number(0, 10),
        default=0.05,
        metavar="C",
        help="… each at this share of a step (0.05)",
    )
    how = parser.add_argument_group("how it runs")
    add = how.add_argument
    add(
        "--tp",
        type=_whole(1, 64),
        default=1,
        metavar="N",
        help="devices that share each layer (default 1)",
    )
    add(
        "--weights",
        choices=sorted(BITS),
        metavar="DTYPE",
        help="weights in another dtype: " + ", ".join(BITS),
    )
    add("--kv-dtype", choices=sorted(BITS), metavar="DTYPE", help="the KV cache in another dtype")
    add(
        "--mfu",
        type=share,
        metavar="S",
        help="share of the peak FLOP/s that is reached (default: the device's, 0.4)",
    )
    add(
        "--mbu",
        type=share,
        metavar="S",
        help="share of the bandwidth that is reached (default: the device's, 0.8)",
    )
    add(
        "--host-ms",
        type=factor,
        default=0.0,
        metavar="MS",
        help="host overhead of a step (default 0)",
    )
    add(
        "--host-us",
        type=factor,
        default=0.0,
        metavar="US",
        help="… and for each sequence in it (default 0)",
    )
    add(
        "--front-end",
        type=factor,
        metavar="MS",
        help="CPU time of a 2,000-token request (default 2.6)",
    )
    add(
        "--roofline",
        choices=[each.value for each in Roofline],
        help="how arithmetic and memory time combine: 2-norm, the longer one, their sum, or "
        "prefill by the first and "
        "decode by the second alone (default smooth; sum on a cpu, which does one after the other)",
    )
    add(
        "--count",
        choices=[each.value for each in Counting],
        default=Counting.TEXTBOOK.value,
        help="every weight for every token, or what kernels do (default textbook)",
    )
    add("--ignore-kv", action="store_true", help="leave reads of the KV cache out")
    room = parser.add_argument_group("who fits")
    add = room.add_argument
    add(
        "--kv-pool",
        type=factor,
        metavar="GIB",
        help="memory for the KV cache (default: what the device has left)",
    )
    add(
        "--longest",
        type=tokens,
        default=8192,
        metavar="N",
        help="tokens of the worst case (default 8192)",
    )
    add(
        "--mean-tokens",
        type=tokens,
        metavar="N",
        help="tokens that users hold on average (default prompt + output)",
    )
    add(
        "--block-size",
        type=_whole(1, 65_536),
        default=16,
        metavar="N",
        help="tokens of a KV block (default 16)",
    )
    ways = parser.add_argument_group("other ways to ask")
    add = ways.add_argument
    add(
        "--screen",
        action="store_true",
        help="on a screen with sliders; without any flag a terminal gets it too",
    )
    add("--journey", action="store_true", help="on a screen, stage by stage, for an audience")
    add(
        "--fit",
        metavar="FILE",
        help="calibrate: MFU, MBU and host overhead of the engine in a recorded trace, and "
        "how well that holds for steps it has not seen; --device where the trace does not name one",
    )
    add(
        "--what-if",
        nargs="+",
        metavar=("FILE", "CHANGE"),
        help="replay a recorded trace with its settings changed: "
        "prefix-cache=on|off chunked=512|off max-num-seqs=64 batch×2 kv-blocks=N rate×2 output×0.5 "
        "device=h100-sxm",
    )


def asks_for_nothing(options: argparse.Namespace) -> bool:
    """Whether no flag of `add_arguments` was given."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return all(
        getattr(options, name) == value for name, value in vars(parser.parse_args([])).items()
    )


def budget_of(options: argparse.Namespace) -> Budget:
    """The budget that the flags ask for. Raises AnalysisError."""
    model = load_model(options.model or MODEL).quantised(options.weights, options.kv_dtype)
    found = device(options.device or DEVICE)
    front = FrontEnd()
    if options.front_end is not None:
        front = front.scaled(options.front_end / sum(front.ms(2000).values()))
    efficiency = Efficiency(
        mfu=found.mfu if options.mfu is None else options.mfu,
        mbu=found.mbu if options.mbu is None else options.mbu,
        host_ms=options.host_ms,
        host_us=options.host_us,
        front_end=front,
        roofline=usual_roofline(found) if options.roofline is None else Roofline(options.roofline),
    )
    speculation = (
        Speculation(options.draft, options.accept, options.draft_cost) if options.draft else None
    )
    workload = Workload(
        options.prompt,
        options.cached,
        options.output,
        options.batch,
        options.context,
        options.chunk,
        speculation,
    )
    if options.kv_pool is not None and options.kv_pool > 1e6:
        raise AnalysisError(f"a KV pool of {options.kv_pool:g} GiB is more than there is")
    return budget(
        model,
        found,
        workload,
        efficiency,
        counting=Counting(options.count),
        tp=options.tp,
        ignore_kv=options.ignore_kv,
        pool_bytes=None if options.kv_pool is None else options.kv_pool * 2.0**30,
        longest=options.longest,
        mean_tokens=options.mean_tokens,
        block_size=options.block_size,
    )
