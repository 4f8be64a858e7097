"""Every command that a page or a `--help` shows is one that the command line takes; what reads a
trace or looks at an engine is run here, on real recordings and a traced process, and what needs
more is run by the test named for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Final

import pytest

from engine_hooks.protocol.environment import SOCKETS
from tests.cli.commands import TRACED_CHILD
from tests.docs.command_line import commands_of, whole_parser
from tests.docs.pages import PAGES, ROOT, TRACER, Shown, examples, shown
from tracer.cli.main import main
from tracer.replay.cursor import load

HELP: Final = tuple(
    command
    for name, parser in commands_of(whole_parser()).items()
    for command in examples(name, parser.epilog or "")
    if command.words[0] == "tracer"
)

ELSEWHERE: Final = {
    ("demo",): "tests/demo/test_demo.py::test_on_a_terminal_it_shows_requests_and_obeys_keys",
    (
        "demo",
        "--fault",
    ): "tests/diagnosis/test_faults.py::test_two_faults_of_a_demo_are_found_in_a_real_engine",
    (
        "demo",
        "--json",
    ): "tests/demo/test_demo.py::test_the_tracer_agrees_with_the_clients_stopwatch",
    (
        "demo",
        "--seed",
    ): "tests/demo/test_demo.py::test_the_tracer_agrees_with_the_clients_stopwatch",
    ("run",): "tests/cli/test_run.py::test_a_traced_command_is_summarised",
    ("run", "vllm"): "tests/vllm/test_serve.py::test_three_processes_tell_one_story",
    ("run", "transformers"): "tests/test_readme.py::test_the_other_commands_run",
    ("run", "--record"): "tests/cli/test_files.py::test_what_was_recorded_is_shown",
    ("run", "--flight-recorder"): "tests/cli/test_recording.py::"
    "test_what_the_flight_recorder_kept_is_written_on_a_signal",
    ("run", "--metrics"): "tests/cli/test_telemetry.py::test_a_run_serves_sends_and_watches",
    ("attach",): "tests/cli/test_screen.py::test_attach_joins_the_only_engine_and_leaves_it_alone",
    ("attach", "--metrics"): "tests/cli/test_screen.py::"
    "test_beside_a_screen_metrics_are_served_and_an_alert_is_seen_and_logged",
    (
        "attach",
        "ssh://",
    ): "tests/remote/test_remote.py::test_a_connection_that_breaks_is_made_again_and_says_so",
    ("show", "ssh://"): "tests/remote/test_remote.py::test_what_runs_on_another_host_is_shown",
    ("record", "ssh://"): "tests/remote/test_remote.py::test_it_is_recorded_over_a_slow_line",
    (
        "record",
        "--flight-recorder",
    ): "tests/cli/test_recording.py::test_a_rule_writes_what_was_before_it_fired",
    ("metrics", "--metrics"): "tests/cli/test_telemetry.py::"
    "test_an_engine_that_runs_already_is_watched_without_a_screen",
    (
        "metrics",
        "--otlp-metrics",
    ): "tests/cli/test_telemetry.py::test_a_run_serves_sends_and_watches",
    ("web",): "tests/cli/test_web.py::test_a_page_shows_the_screens_and_takes_keys",
}
"""Words that are in a command → the test that runs such a one. Of several the last."""

ON_A_TERMINAL: Final = {
    ("replay",): "tests/cli/test_files.py::test_a_recording_is_replayed_in_the_same_screens",
    (
        "compare",
        "--screen",
    ): "tests/compare/test_command.py::test_on_a_terminal_the_screen_opens_on_the_comparison",
    (
        "budget",
        "--screen",
    ): "tests/cli/test_budget_screen.py::test_sliders_and_journey_need_no_engine",
    (
        "budget",
        "--journey",
    ): "tests/cli/test_budget_screen.py::test_sliders_and_journey_need_no_engine",
}
"""Commands that here, where there is no terminal, only say so."""

OTHERS: Final = {
    "ssh": "another host",
    "docker": "a daemon",
    "kubectl": "a cluster",
    "kill": "a process",
    "source": "a shell",
    "chmod": "rights to /srv",
    "python3": ".ci/run",
    ".venv/bin/python": ".ci/run",
    ".venv/bin/pip": ".ci/run",
    ".venv/bin/ruff": ".ci/run",
    ".venv/bin/mypy": ".ci/run",
    ".venv/bin/lint-imports": ".ci/run",
    "mkdir": "rights to /srv",
    "pip": "a registry",
}
"""Programs that are not ours, and what it takes to run them."""

STANDS_FOR: Final = {
    "before.trace": "transformers-shared-prefix", "good.trace": "vllm-long-prompt-chunked",
    "new.trace": "vllm-long-prompt", "cold.trace": "vllm-cold", "warm.trace": "vllm-shared-prefix",
    "loaded.trace": "vllm-loaded", "after.trace": "transformers-loaded",
}  # fmt: skip
"""Which recording is looked at under a name; `transformers-mixed` under any other."""
LIVE: Final = ("4711", "PID")
"""Pids in examples."""


def table_entry(command: Shown, table: dict[tuple[str, ...], str]) -> str | None:
    """The last entry of a table whose words are in the command."""
    words = command.arguments or ()
    ours = words[: words.index("--") + 2] if words[:1] == ("run",) and "--" in words else words
    found = None
    for key, place in table.items():
        if ours[:1] == key[:1] and all(
            any(word.startswith(part) for word in ours) for part in key[1:]
        ):
            found = place
    return found


def unique(commands: tuple[Shown, ...]) -> list[Shown]:
    return list({command.words: command for command in commands}.values())


def test_the_pages_are_seen() -> None:
    assert len(PAGES) > 15 and len(TRACER) > 50 and len(HELP) > 40


@pytest.mark.parametrize("command", unique((*TRACER, *HELP)), ids=str)
def test_the_command_line_takes_it(command: Shown) -> None:
    """Each option exists and each value can be read."""
    options = whole_parser().parse_args(command.arguments)
    assert options.call is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_other_programs_are_known_ones(page: Path) -> None:
    for command in shown(page):
        assert command.arguments is not None or command.words[0] in OTHERS, str(command)


@pytest.mark.parametrize("place", sorted({*ELSEWHERE.values(), *ON_A_TERMINAL.values()}))
def test_what_is_run_elsewhere_is_really_run_there(place: str) -> None:
    path, _, name = place.partition("::")
    text = (ROOT / path).read_text(encoding="utf-8")
    assert f"def {name}(" in text
    keys = [
        key
        for table in (ELSEWHERE, ON_A_TERMINAL)
        for key, value in table.items()
        if value == place
    ]
    for option in {word for key in keys for word in key if word.startswith("--")}:
        assert f'"{option}"' in text, f"no {option} in {path}"


# --- run here -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """A traced process called vllm: its pid, and the folder of its socket."""
    sockets = tmp_path_factory.mktemp("s")
    sockets.chmod(0o700)
    process = subprocess.Popen(
        [sys.executable, str(TRACED_CHILD), "vllm", "for", "600"],
        stdout=subprocess.PIPE,
        env={**os.environ, SOCKETS: str(sockets)},
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    yield process.pid, sockets
    process.terminate()
    process.communicate(timeout=30)


@pytest.fixture
def here(tmp_path: Path, engine: tuple[int, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with caches and sockets of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("TRACER_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.setenv(SOCKETS, str(engine[1]))
    return tmp_path


def put(name: str) -> None:
    """Make the file that a command reads."""
    if name.endswith(".trace"):
        stem = (
            Path(name).stem
            if name.startswith("recordings/")
            else STANDS_FOR.get(name, "transformers-mixed")
        )
        Path(name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "recordings" / f"{stem}.trace", name)
    elif name.endswith(".chrome.json"):
        trace = ROOT / "recordings" / "vllm-cold.trace"
        assert main(["export", str(trace), "--to", "chrome", "-o", name]) == 0
    elif name == "spans.jsonl":
        shutil.copy(ROOT / "tests" / "spans" / "vllm.json", name)
    elif name == "stopwatch.jsonl":
        request = load(ROOT / "recordings" / "transformers-mixed.trace").requests.order[-1]
        Path(name).write_text(
            json.dumps({"client_id": request.client_id, "ttft_ms": 900, "e2e_ms": 9000}) + "\n"
        )
    elif name == "./my-model":
        Path(name).mkdir()
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576,
                  "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
                  "num_key_value_heads": 3, "vocab_size": 49152, "dtype": "bfloat16"}  # fmt: skip
        (Path(name) / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def collector() -> Iterator[str]:
    """Address of something that takes what is posted to it."""

    class Taker(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing: what is served is no output of the command."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Taker) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def arguments_here(command: Shown, pid: int, collector: str) -> list[str]:
    """The arguments with this process for any pid, no longer than needed, and the files that they
    name made."""
    words = [
        str(pid) if word in LIVE else word.removeprefix("/run/tracer/")
        for word in command.arguments or ()
    ]
    for at, word in enumerate(words):
        before = words[at - 1] if at else ""
        if before == "--seconds":
            words[at] = "0.3"
        elif before == "--endpoint":
            words[at] = collector
        elif before == "--request":
            live = str(pid) in words
            words[at] = "waits-2" if live else load(words[1]).request_ids()[-1]
        elif before not in ("-o", "--output") and not Path(word).exists():
            put(word)
    return (
        [*words, "--seconds", "0.3"] if words[0] == "record" and "--seconds" not in words else words
    )


RUN_HERE: Final = [
    command for command in unique((*TRACER, *HELP))
    if table_entry(command, ELSEWHERE) is None and command.arguments != ("relay",)
]  # fmt: skip


@pytest.mark.parametrize("command", RUN_HERE, ids=str)
def test_it_does_what_it_should(
    command: Shown,
    here: Path,
    engine: tuple[int, Path],
    collector: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(arguments_here(command, engine[0], collector))
    told = capsys.readouterr()
    if table_entry(command, ON_A_TERMINAL) is not None:
        assert code == 2 and "no terminal" in told.err and told.err.count("\n") == 1
        return
    assert code == 0 or (code == 1 and "--fail-on" in command.words), told.err
    assert told.out.strip() or told.err.startswith("tracer: ")
    if "--json" in command.words:
        assert isinstance(json.loads(told.out), dict)
    if "-o" in command.words:
        assert (here / Path(command.words[command.words.index("-o") + 1]).name).exists()


def test_most_are_run_here() -> None:
    assert len(RUN_HERE) > 35
