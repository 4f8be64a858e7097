"""Rounds of faults on a real engine under load: every process of it and its viewers killed,
stopped, ended, restarted.

    python -m tests.bench.rounds --out FILE --engine transformers --model FOLDER --rounds 200
    python -m tests.bench.rounds --out FILE --engine vllm --model FOLDER --rounds 30 --minutes 9
    python -m tests.bench.rounds --out FILE --engine paper --rounds 500 --seed 7   no model
        … --rounds 2 --acts "kill core" --acts "stop watcher 30, kill api"         these acts
    python -m tests.bench.rounds --out FILE                                        the tables alone

A round follows from its seed (`tests.faults.acts`): requests of the demo's clients, one to four
acts on processes drawn by chance, then all that must be true (`tests.faults.round`). The engine
lives on through the rounds in which none of its own processes was ended. With ``--acts`` nothing is
left to chance but load and times. Rounds are appended to ``--out`` as they end; a later call runs
the seeds that are missing, so that several short calls add up. vLLM runs in an environment of its
own: `tests.vllm.server.vllm_python`.

Exit code 1 when a round of this call did not hold.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from tests.faults.acts import directed, plan
from tests.faults.engine import TracedEngine, TroubleError
from tests.faults.round import Rounds

DEADLY = {"transformers": 0.2, "vllm": 0.15, "paper": 0.3}
"""Share of the rounds in which a process of the engine is ended: it has to be started anew then."""


@dataclass
class Outcome:
    """One round. `acts` as ``kill screen``; `problems` what did not hold, empty when all did;
    `missing` events that the watcher counted as lost; `started` whether the engine came up for it;
    `asked` the acts that were asked for, empty when they were drawn."""

    engine: str
    seed: int
    acts: list[str]
    problems: list[str]
    missing: int
    requests: int
    seconds: float
    started: bool
    at: str
    asked: str = ""


def run(
    engine: str, model: str, wanted: Sequence[tuple[int, str]], minutes: float, out: Path
) -> int:
    """The rounds of these seeds and acts (drawn when empty), as far as the time allows; how many
    did not hold."""
    python = ""
    if engine == "vllm":
        from tests.vllm.server import vllm_python

        python = str(vllm_python())
    until = time.monotonic() + minutes * 60
    rounds: Rounds | None = None
    failed = 0
    try:
        for seed, asked in wanted:
            if time.monotonic() > until:
                break
            started = rounds is None
            if rounds is None:
                rounds = Rounds(TracedEngine(engine, model, seed, python))
            roles = list(rounds.engine.roles)
            this = directed(asked, seed, roles) if asked else plan(seed, roles, DEADLY[engine])
            begin = time.monotonic()
            problems = rounds.do(this)
            seconds = time.monotonic() - begin
            if rounds.dead is not None or problems:
                problems = problems + rounds.close()
            outcome = Outcome(
                engine,
                seed,
                [str(act) for act in this.acts],
                problems,
                rounds.missing,
                sum(this.visits),
                round(seconds, 1),
                started,
                datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
                asked,
            )
            if rounds.dead is not None or problems:
                rounds = None
            failed += bool(problems)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
            print(
                f"{engine} {seed}: {', '.join(outcome.acts)}: {'; '.join(problems) or 'held'} "
                f"({seconds:.0f} s)",
                file=sys.stderr,
                flush=True,
            )
    finally:
        if rounds is not None:
            left = rounds.close()
            failed += bool(left)
            if left:
                print(f"at the end: {'; '.join(left)}", file=sys.stderr)
    return failed


def read(out: Path) -> list[Outcome]:
    """The rounds that have run."""
    if not out.exists():
        return []
    return [
        Outcome(**json.loads(line)) for line in out.read_text(encoding="utf-8").splitlines() if line
    ]


def table(outcomes: Sequence[Outcome]) -> str:
    """Rounds and acts by engine, and how many held, in Markdown."""
    tried: Counter[tuple[str, str]] = Counter()
    held: Counter[tuple[str, str]] = Counter()
    engines = sorted({one.engine for one in outcomes})
    for one in outcomes:
        for name in ("all rounds", *dict.fromkeys(one.acts)):
            tried[name, one.engine] += 1
            held[name, one.engine] += not one.problems
    names = ["all rounds", *sorted({name for name, _ in tried} - {"all rounds"})]
    lines = ["| rounds with | " + " | ".join(engines) + " |", "|---|" + "---|" * len(engines)]
    for name in names:
        cells = [
            f"{held[name, engine]} of {tried[name, engine]} held" if tried[name, engine] else "–"
            for engine in engines
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", choices=sorted(DEADLY), default="transformers")
    parser.add_argument("--model", default="", help="folder of a model; paper needs none")
    parser.add_argument(
        "--rounds", type=int, default=0, help="rounds that this engine shall have; 0: the tables"
    )
    parser.add_argument(
        "--acts", action="append", default=[], help="of a round, as kill core, stop watcher 30"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the first round")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no round after so many")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    options = parser.parse_args()
    # an end in which the engine and its viewers are ended too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    done = {(one.seed, one.asked) for one in read(options.out) if one.engine == options.engine}
    wanted = [(seed, asked) for seed in range(options.seed, options.seed + options.rounds)
              for asked in options.acts or [""] if (seed, asked) not in done]  # fmt: skip
    failed = 0
    try:
        if wanted:
            failed = run(options.engine, options.model, wanted, options.minutes, options.out)
    except (TroubleError, ValueError) as trouble:
        print(f"rounds: {trouble}", file=sys.stderr)
        return 2
    outcomes = read(options.out)
    for title, some in (("drawn", [one for one in outcomes if not one.asked]),
                        ("asked for", [one for one in outcomes if one.asked])):  # fmt: skip
        if some:
            print(f"Rounds that were {title}:\n\n{table(some)}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
