"""What-if against the truth: settings changed for real on the real engine, beside what was
predicted without doing so.

    flock /tmp/engine.lock python -m tests.bench.whatif_truth MODEL [--seeds 1 2 3] [--requests 24]

SmolLM2 on transformers' continuous batching, one thread. For each seed of the traffic the same
requests run once as they are and once for each change: prefix cache on, chunks of a quarter, half
the slots. The prediction is made from the unchanged run alone, with a step fitted to all unchanged
runs. Times are CPU times of the engine's process (see `tests.analysis.engine_runs`): other programs
on the machine do not count, what they do to the caches does. ``--noise`` runs the unchanged plan
twice and says how far two equal runs differ: no prediction can be better than that.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.analysis.runs import Plan, play
from tracer.analysis.beside.observed import Observed, observe
from tracer.analysis.fit.fit import fit
from tracer.analysis.whatif.whatif import label, measured_figures, what_if

COMPARED = ("ttft_p50", "ttft_p95", "itl_mean", "e2e_p95", "throughput")
CLEAR = 0.10
"""A measured change below it is within what equal runs differ by: its sign says nothing."""


def changes(base: Plan) -> dict[str, tuple[Plan, str]]:
    """What is changed: the plan that does it, and the words that predict it."""
    chunk, slots = base.tokens // 4, base.slots // 2
    return {
        "cache": (replace(base, share=True), "prefix-cache=on"),
        "chunk": (replace(base, tokens=chunk), f"chunked={chunk}"),
        "slots": (replace(base, slots=slots), f"max-num-seqs={slots}"),
    }


def main() -> None:
    """Run, predict, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--rate", type=float, default=6.0)
    parser.add_argument("--noise", action="store_true")
    parser.add_argument(
        "--timeout", type=float, default=530.0, help="seconds after which the runs are given up"
    )
    options = parser.parse_args()
    bases = {
        seed: Plan(options.requests, options.rate, prompt=96, output=16, seed=seed)
        for seed in options.seeds
    }
    plans: dict[str, Plan] = {}
    for seed, base in bases.items():
        plans[f"base {seed}"] = base
        plans |= {f"{name} {seed}": plan for name, (plan, _) in changes(base).items()}
        if options.noise:
            plans[f"again {seed}"] = base
    begin = time.monotonic()
    seen = {
        name: observe(state)
        for name, state in play(options.model, plans, options.timeout).states.items()
    }
    print(f"{len(plans)} runs in {time.monotonic() - begin:.0f} s, load {os.getloadavg()[0]:.1f}")
    report(seen, bases)


def report(seen: dict[str, Observed], bases: dict[int, Plan]) -> None:
    """Predict from the unchanged runs, and print the predictions beside the truth."""
    unchanged = [seen[f"base {seed}"] for seed in bases]
    first = unchanged[0]
    fitted = fit(
        [step for each in unchanged for step in each.steps],
        first.model(),
        first.device(),
        dense=first.dense,
        context=np.concatenate([each.context for each in unchanged]),
        pairs=np.concatenate([each.pairs for each in unchanged]),
    )
    print(fitted.sentence())
    print(
        f"{fitted.steps} steps: {fitted.step_error:.1%} off out of sample, prompts "
        f"{fitted.prefill_error:.1%}"
    )
    print(
        f"\n{'':<8}{'seed':>4}  "
        f"{'':<11}{'unchanged':>10}{'measured':>10}{'predicted':>10}{'off':>7}   "
        "change measured, predicted"
    )
    errors: dict[str, list[float]] = {}
    wrong, clear = 0, 0
    for change, (_, words) in changes(bases[next(iter(bases))]).items():
        for seed in bases:
            told = what_if(seen[f"base {seed}"], words, fitted=fitted)
            truth = measured_figures(seen[f"{change} {seed}"])
            for figure in COMPARED:
                metric = told.metric(figure)
                before, after = metric.measured or metric.before, truth[figure]
                was, said, off = (
                    after / before - 1,
                    metric.predicted / before - 1,
                    metric.predicted / after - 1,
                )
                errors.setdefault(change, []).append(abs(off))
                errors.setdefault(figure, []).append(abs(off))
                sign = ""
                if abs(was) > CLEAR:
                    clear += 1
                    if was * said <= 0:
                        wrong += 1
                        sign = "  WRONG SIGN"
                print(
                    f"{change:<8}{seed:>4}  "
                    f"{label(figure):<11}{before:>10.1f}{after:>10.1f}{metric.predicted:>10.1f}"
                    f"{off:>7.0%}   {was:+.0%}, {said:+.0%}{sign}"
                )
            real = seen[f"{change} {seed}"]
            print(
                f"{change:<8}{seed:>4}  steps {len(seen[f'base {seed}'].steps)} → "
                f"{len(real.steps)}, replayed "
                f"{told.after.steps}; cached {sum(each.cached for each in real.arrivals)}, "
                f"replayed {np.nansum(told.after.cached):.0f}"
            )
    print(f"\nsigns: {clear - wrong} of {clear} clear changes right")
    for name, values in errors.items():
        print(
            f"median error {label(name):<11}{np.median(values):>5.0%}   worst {max(values):>5.0%}  "
            f" of {len(values)}"
        )
    for seed in bases:
        again = seen.get(f"again {seed}")
        if again is not None:
            one, other = measured_figures(seen[f"base {seed}"]), measured_figures(again)
            said = ", ".join(
                f"{label(name)} {abs(other[name] / one[name] - 1):.0%}" for name in COMPARED
            )
            print(f"two equal runs, seed {seed}: {said}")


if __name__ == "__main__":
    main()
