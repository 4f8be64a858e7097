"""Makes the recordings of this folder: `python recordings/make.py NAME … [--model FOLDER] [--into
FOLDER]`.

Each is `tracer run --record FILE -- SERVER` with real HTTP clients beside it: what happens is the
engine's doing, only what is asked of it is ours. Run it with the Python of the environment that has
the engine; without a name it lists them. The one that is modelled needs no engine.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tracer.demo.demo import LAUNCHERS
from tracer.demo.launch import Launch, free_port
from tracer.demo.model import ensure_model
from tracer.demo.prompts import DOCUMENT, QUESTIONS, STORIES, SYSTEM_PROMPTS

HERE = Path(__file__).parent
START_S = 300
"""Patience with a server that loads."""
SETTLE_S = 2.0
"""Before the first request and after the last one."""
REPORT = "\n\n".join((*DOCUMENT, *DOCUMENT[::-1]))
"""Some 2,000 tokens."""


class Clients:
    """People who use the server's chat API, each in a thread of its own."""

    def __init__(self, launch: Launch, model: str) -> None:
        self._port, self._model = launch.port, model
        self._threads: list[threading.Thread] = []

    def come(
        self, text: str, tokens: int, *, system: str = "", leave_after: int | None = None
    ) -> None:
        """One more client asks, now. It goes away after `leave_after` pieces of the answer."""
        messages = [{"role": "system", "content": system}] if system else []
        body = {
            "model": self._model,
            "messages": [*messages, {"role": "user", "content": text}],
            "stream": True,
            "max_tokens": tokens,
        }
        thread = threading.Thread(target=self._ask, args=(body, leave_after))
        thread.start()
        self._threads.append(thread)

    def wait(self) -> None:
        """Until all have their answers."""
        while self._threads:
            self._threads.pop().join()

    def _ask(self, body: dict[str, object], leave_after: int | None) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"the server answered {answer.status}: {answer.read()[:500]!r}")
        pieces = 0
        while line := answer.readline():
            pieces += line.startswith(b"data: {")
            if pieces == leave_after:
                break
        # What reads the answer holds the connection too: both have to let go of it.
        answer.close()
        connection.close()


def cold(clients: Clients) -> None:
    clients.come(QUESTIONS[0], 48)
    clients.wait()


def shared_prefix(clients: Clients) -> None:
    clients.come(QUESTIONS[0], 16, system=SYSTEM_PROMPTS[0])
    clients.wait()
    for question in QUESTIONS[1:5]:
        clients.come(question, 16, system=SYSTEM_PROMPTS[0])
        time.sleep(0.4)
    clients.wait()


def loaded(clients: Clients) -> None:
    for number in range(24):
        clients.come(
            f"{DOCUMENT[number % len(DOCUMENT)]}\n\nTell me more about this, part {number}.",
            24 + number,
        )
        time.sleep(0.1)
    clients.wait()


def long_prompt(clients: Clients) -> None:
    for story in STORIES[:3]:
        clients.come(story, 110)
    time.sleep(2.0)
    clients.come(f"{REPORT}\n\nWhat does this say, in one sentence?", 12)
    clients.wait()


def outgrown(clients: Clients) -> None:
    for story in STORIES[:4]:
        clients.come(story, 110)
        time.sleep(0.2)
    clients.wait()


def hang_up(clients: Clients) -> None:
    clients.come(STORIES[0], 120)
    time.sleep(0.5)
    for story in STORIES[1:4]:
        clients.come(story, 120, leave_after=6)
        time.sleep(0.8)
    clients.wait()


@dataclass(frozen=True)
class Story:
    """What is asked of which engine, and options of its server that differ from the demo's."""

    engine: str
    traffic: Callable[[Clients], None]
    options: dict[str, str] = field(default_factory=dict)


_BIG = {"--cb-num-blocks": "640"}
_ROOMY = {"--num-gpu-blocks-override": "321"}
STORIES_BY_NAME = {
    "transformers-cold": Story("transformers", cold, _BIG),
    "transformers-shared-prefix": Story("transformers", shared_prefix, _BIG),
    "transformers-loaded": Story("transformers", loaded, {"--cb-num-blocks": "96"}),
    "transformers-long-prompt": Story(
        "transformers", long_prompt, {**_BIG, "--cb-max-batch-tokens": "4096"}
    ),
    "transformers-long-prompt-chunked": Story(
        "transformers", long_prompt, {**_BIG, "--cb-max-batch-tokens": "256"}
    ),
    "transformers-preemption": Story("transformers", outgrown, {"--cb-num-blocks": "20"}),
    "transformers-hang-up": Story("transformers", hang_up, _BIG),
    "vllm-cold": Story("vllm", cold, _ROOMY),
    "vllm-shared-prefix": Story("vllm", shared_prefix, _ROOMY),
    "vllm-loaded": Story("vllm", loaded, {"--max-num-seqs": "6"}),
    "vllm-long-prompt": Story("vllm", long_prompt, {**_ROOMY, "--max-num-batched-tokens": "4096"}),
    "vllm-long-prompt-chunked": Story(
        "vllm", long_prompt, {**_ROOMY, "--max-num-batched-tokens": "256"}
    ),
    "vllm-preemption": Story(
        "vllm", outgrown, {"--max-model-len": "320", "--num-gpu-blocks-override": "13"}
    ),
    "vllm-hang-up": Story("vllm", hang_up, _ROOMY),
}
MODELLED = "h100-reference"


def with_options(command: Sequence[str], options: dict[str, str]) -> list[str]:
    """The server's command with other values for some of its options."""
    words = list(command)
    for option, value in options.items():
        if option in words:
            words[words.index(option) + 1] = value
        else:
            words += [option, value]
    return words


def wait_for(launch: Launch, process: subprocess.Popen[bytes]) -> None:
    """Until the server takes requests."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", launch.port, timeout=2)
        try:
            connection.request("GET", launch.health)
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.2)
    raise SystemExit("the server did not come into service")


def record(name: str, model: str, path: Path) -> None:
    """Run the engine of a story with the hooks on, and its clients."""
    story = STORIES_BY_NAME[name]
    launch = LAUNCHERS[story.engine](model, free_port())
    path.unlink(missing_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "tracer", "run", "--headless", "--record", str(path), "--",
         *with_options(launch.command, story.options)],
        env={**os.environ, **launch.environment}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for(launch, process)
        time.sleep(SETTLE_S)
        story.traffic(Clients(launch, model))
        time.sleep(SETTLE_S)
    finally:
        process.send_signal(signal.SIGTERM)  # which the server gets; the recording ends before
        process.wait()


def model_h100(path: Path) -> None:
    """The reference request as the budget has it: modelled, not measured."""
    from engine_hooks.protocol.recorder import Recorder
    from engine_hooks.protocol.stream_decoder import Delivery
    from tracer.analysis.budget.modelled import modelled_events, modelled_header
    from tracer.analysis.budget.reference import reference
    from tracer.recording import event_columns

    # as the reference figures are: reading the KV cache adds 1.6 %
    made = reference(ignore_kv=True)
    header = modelled_header(made)
    path.unlink(missing_ok=True)
    recorder = Recorder(path, encode=event_columns.encode)
    recorder.write(Delivery(header.source, header))
    for event in modelled_events(made):
        recorder.write(Delivery(header.source, None, [event]))
    recorder.close()


def main() -> None:
    """Make the recordings that are named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", choices=[*STORIES_BY_NAME, MODELLED, []]
    )
    parser.add_argument("--model", help="a model folder (default: the demo's, fetched once)")
    parser.add_argument("--into", type=Path, default=HERE, metavar="FOLDER")
    options = parser.parse_args()
    if not options.names:
        print("\n".join([*STORIES_BY_NAME, MODELLED]))
    for name in options.names:
        path = options.into / f"{name}.trace"
        if name == MODELLED:
            model_h100(path)
        else:
            record(name, options.model or str(ensure_model()), path)
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
