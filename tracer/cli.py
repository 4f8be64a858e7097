"""The command line: arguments in, one function a command, exit codes out.

Exit codes: 0 done, 2 wrong usage or bad input with a one-line reason, 128 + n when signal n ended us; `run` exits like
the command that it ran. Whatever a command needs is imported when it is called: `tracer --help` stays quick.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tracer import __version__, arguments
from tracer.comparison import add_commands as add_comparison
from tracer.completion import add_commands as add_completion
from tracer.exports import add_commands as add_exports
from tracer.record_command import add_commands as add_recording
from tracer.record_command import add_flight_arguments, new_flight, new_recorder
from tracer.slo import add_option as add_slo
from tracer.stdout import has_bars, has_screen, width
from tracer.studies import add_commands
from tracer.telemetry import add_commands as add_telemetry
from tracer.telemetry import add_outlet_arguments
from tracer.web import add_commands as add_web

if TYPE_CHECKING:
    from tracer.remote import RemoteTarget
    from tracer.run import Job
    from tracer.state.trace_state import TraceState
    from tracer.state.view import Snapshot
    from tracer.targets import Target


ENGINES = ("transformers", "vllm")
"""What `tracer demo` can start: the keys of `engine_hooks.demo.LAUNCHERS`, here so that --help need not load them."""


KNOWN = (
    "ExportError", "LinkError", "WebError", "MetricsError", "AlertsError", "MissingExtraError", "TargetError",
    "TraceFileError", "AnalysisError",
)  # fmt: skip
"""Errors whose message is a sentence for the user, by name: to import them all takes longer than --help may."""


class UsageError(Exception):
    """Wrong usage or bad input: one line, exit 2."""


# --- commands ------------------------------------------------------------------------------------------------------


def demo(options: argparse.Namespace) -> int:
    """Run an embedded model under real traffic and watch it."""
    from engine_hooks.demo import Demo

    job = Demo(options.engine, options.model, options.rate, options.seed, stopwatch=options.stopwatch,
               fault=options.fault)  # fmt: skip
    return _run(job, options, traffic=job.traffic, mode="demo")


def run(options: argparse.Namespace) -> int:
    """Run an unmodified command with the hooks on and watch it."""
    from tracer.run import Command

    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise UsageError("no command given; for example: tracer run -- vllm serve MODEL")
    return _run(Command(command), options, traffic=None, mode="live")


def attach(options: argparse.Namespace) -> int:
    """Join engines that run with the hooks on."""
    import asyncio

    from tracer.remote import RemoteTarget, is_remote
    from tracer.targets import choose, find_targets, table

    away = [name for name in options.targets if is_remote(name)]
    if len(options.targets) > 1 and len(away) < len(options.targets):
        raise UsageError("one target of this host, or one or more of the form ssh://HOST")
    targets = [] if away else find_targets()
    if away and not has_screen():
        raise UsageError(f"no terminal to show {away[0]} in; print it once with: tracer show {away[0]}")
    if away:
        return _attach(RemoteTarget.open(away), options)
    if not targets:
        raise UsageError("nothing runs with the hooks on; start an engine with: tracer run -- CMD …")
    if options.list:
        _print("\n".join(asyncio.run(table(targets))))
        return 0
    target = choose(targets, options.targets[0]) if options.targets else _only(targets)
    if not has_screen():
        raise UsageError(f"no terminal to show {target.name} in; print it once with: tracer show {target.name}")
    return _attach(target, options)


def _attach(target: Target | RemoteTarget, options: argparse.Namespace) -> int:
    from tracer.outlets import Outlets
    from tracer.screen import show_live
    from tracer.voice import Voice

    outlets = Outlets.open(options, Voice().say)
    try:
        return show_live(target.sources(), target.name, slo=options.slo, outlets=outlets)
    finally:
        outlets.close()


def show(options: argparse.Namespace) -> int:
    """Print what an engine does or a recorded trace tells, once."""
    from tracer.studies import state_of

    state = state_of(options.target)
    if options.request is not None:
        _print_request(state, options.request, options.json)
    else:
        from tracer.state.numbers import Ask

        _print_summary(state.snapshot(numbers=Ask(slo=options.slo)), options.json)
    return 0


def relay(options: argparse.Namespace) -> int:
    """Carry events over stdin and stdout: the far end of tracer attach ssh://HOST."""
    from tracer.relay import carry

    return carry(options.target)


def doctor(options: argparse.Namespace) -> int:
    """Say what is hooked, what is not and why, versions and sockets."""
    from tracer.doctor import report

    _print("\n".join(report()))
    return 0


# --- runs ----------------------------------------------------------------------------------------------------------


def _run(job: Job, options: argparse.Namespace, *, traffic: Any, mode: str) -> int:
    """Run a job, with or without a screen."""
    from engine_hooks.inject import environment
    from tracer.outlets import Outlets
    from tracer.run import Run, RunError
    from tracer.voice import Voice

    voice = Voice()
    headless = options.headless or options.json or options.seconds is not None
    if not headless and not has_screen():
        voice.say("no terminal here: running as with --headless")
        headless = True
    outlets = Outlets.open(options, voice.say)
    try:
        flight = new_flight(options, options.record, voice.say)
        whole = options.record is not None and flight is None
        recorder = new_recorder(options.record, options.with_text) if whole else None
        this = Run(job, environment, voice.say, log=options.log, on_line=voice.line if headless else None,
                   recorder=recorder, flight=flight)  # fmt: skip
    except OSError as error:
        place = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise UsageError(f"cannot begin a run: {place}") from error
    this.outlets = outlets
    try:
        if headless:
            return _headless(this, options)
        from tracer.screen import show_run

        return show_run(this, voice, traffic=traffic, mode=mode, with_text=options.with_text, slo=options.slo)
    except RunError as error:
        for line in () if headless else this.tail():
            voice.line(line)
        voice.say(str(error))
        return error.code
    finally:
        outlets.close()
        this.close()


def _headless(this: Any, options: argparse.Namespace) -> int:
    import asyncio

    from tracer.headless import attend

    outcome = asyncio.run(attend(this, options.seconds, options.slo, with_text=options.with_text))
    if not this.traced:
        this.say(this.untraced)
    facts = {"name": this.name, "command": this.job.title, "exit_code": outcome.exit_code,
             "seconds": round(this.seconds, 3), "log": this.log.path}  # fmt: skip
    more = {"run": facts, "diagnosis": outcome.diagnosis.summary(), **this.job.extra(outcome.snapshot),
            **this.outlets.extra(outcome.snapshot.began)}  # fmt: skip
    _print_summary(outcome.snapshot, options.json, more)
    if not options.json:
        from tracer.text import clean

        _print(f"\ndiagnosis: {clean(outcome.diagnosis.verdict)}")
    return outcome.exit_code or this.outlets.exit_code


# --- choosing and printing -------------------------------------------------------------------------------------------


def _only(targets: Sequence[Target]) -> Target:
    """The single target, or the one that the user picks. Raises UsageError where nobody can be asked."""
    import asyncio

    from tracer.targets import choose, table

    if len(targets) == 1:
        return targets[0]
    lines = asyncio.run(table(targets))
    print("\n".join(lines), file=sys.stderr)
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError("several engines run: name one, for example: tracer attach " + targets[0].name)
    print("which one? ", end="", file=sys.stderr, flush=True)
    return choose(targets, sys.stdin.readline().strip())


def _print_summary(snapshot: Snapshot, as_json: bool, extra: dict[str, object] | None = None) -> None:
    """The state as JSON, or as text that fits the terminal."""
    from tracer.export import jsondoc, text

    if as_json:
        from tracer.analysis.beside import Beside

        _print_json(jsondoc.document(snapshot, extra=extra, beside=Beside()))
    else:
        _print(text.report(snapshot, width=width(), unicode=has_bars(), colour=_colour()).rstrip("\n"))


def _print_request(state: TraceState, wanted: str, as_json: bool) -> None:
    """One request closely. Raises UsageError when it is not known."""
    from tracer.analysis.beside import Beside
    from tracer.export import jsondoc, text

    detail = state.detail(wanted)
    if detail is None:
        known = ", ".join(name[:200] for name in state.request_ids()[-5:]) or "none"
        raise UsageError(f"no request {wanted[:200]}; the latest are: {known}")
    beside, snapshot = Beside(), state.snapshot(limit=0)
    if as_json:
        _print_json(jsondoc.request(detail, snapshot, beside))
        return
    engine = jsondoc.engine_of(detail.view, snapshot)
    expected = beside.stages(engine, detail)
    note = "" if engine is None else beside.basis(engine).text
    _print(text.request_report(detail, width=width(), unicode=has_bars(), colour=_colour(), expected=expected,
                               expected_from=note).rstrip("\n"))  # fmt: skip


def _print_json(document: dict[str, Any]) -> None:
    """JSON in ASCII, which every encoding of stdout can hold."""
    import json

    _print(json.dumps(document, indent=2))


def _print(text: str) -> None:
    """Print on stdout whatever its encoding can hold."""
    encoding = sys.stdout.encoding or "ascii"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding) + "\n")


def _colour() -> bool:
    """Whether stdout is a terminal that takes colours."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")


# --- arguments -----------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        from tracer.text import clean

        self.exit(2, f"{self.prog}: {clean(message)} (see {self.prog} --help)\n")


def _fault(text: str) -> Any:
    from engine_hooks.faults import FaultError, fault

    try:
        return fault(text)
    except FaultError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _faults_help() -> str:
    from engine_hooks.faults import FAULTS

    return (f"a real fault, for the diagnosis to find: {', '.join(FAULTS)}; NAME@20 begins it after 20 s, NAME+NAME "
            "has two at once")  # fmt: skip


def _parser(wanted: str = "") -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tracer",
        description="A live stopwatch on every stage of every request in an LLM engine.",
        epilog="examples:\n"
        "  tracer demo                                     a real model, real traffic, nothing to set up\n"
        "  tracer run -- transformers serve MODEL --continuous-batching\n"
        "  tracer attach                                   join what runs with the hooks on\n"
        "  tracer show 4711 --json                         print it once, for a program\n"
        "  tracer replay slow.trace                        the same screens, the morning after",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tracer {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="name")

    def command(name: str, call: Callable[[argparse.Namespace], int], examples: str) -> argparse.ArgumentParser:
        summary = (call.__doc__ or "").strip().splitlines()[0]
        added = commands.add_parser(
            name, help=summary[0].lower() + summary[1:].rstrip("."), description=summary,
            epilog="examples:\n" + examples, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        )  # fmt: skip
        added.set_defaults(call=call)
        return added

    def headless(added: argparse.ArgumentParser) -> None:
        add = added.add_argument
        add("--headless", action="store_true", help="no screen: the engine's output on stderr, a summary in the end")
        add("--seconds", type=arguments.seconds, metavar="N",
            help="end after N seconds of service (implies --headless)")  # fmt: skip
        add("--json", action="store_true", help="the summary as JSON on stdout (implies --headless)")
        add("--record", type=Path, metavar="FILE", help="record what happens to FILE, to be replayed")
        add("--with-text", action="store_true", help="record prompts and outputs too")
        add_flight_arguments(added)
        add_outlet_arguments(added)
        add("--log", type=Path, metavar="FILE", help="append the engine's output to FILE, not to one in the log folder")
        add_slo(added)

    one = command("demo", demo,
        "  tracer demo\n"
        "  tracer demo --rate 2 --seed 7\n"
        "  tracer demo --model ./my-model\n"
        "  tracer demo --fault slow-sampler@20             something goes wrong, 20 s after the first request\n"
        "  tracer demo --headless --seconds 30 --json > demo.json")  # fmt: skip
    one.add_argument("--engine", choices=ENGINES, default=ENGINES[0], help="which engine to start")
    one.add_argument("--model", metavar="FOLDER|ID", help="which model (default: a 135M chat model, fetched once)")
    one.add_argument("--rate", type=arguments.rate, metavar="R",
                     help="arrivals a second (default 0.5, or what --fault needs)")  # fmt: skip
    one.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the traffic (default 0)")
    one.add_argument("--stopwatch", type=Path, metavar="FILE", help="write what each client measured, a JSON line each")
    one.add_argument("--fault", type=_fault, metavar="NAME", help=_faults_help() if wanted == "demo" else None)
    headless(one)

    one = command("run", run,
        "  tracer run -- vllm serve MODEL\n"
        "  tracer run -- transformers serve MODEL --continuous-batching\n"
        "  tracer run --headless --seconds 60 --json -- python app.py")  # fmt: skip
    headless(one)
    one.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD …", help="the command, as you would type it")

    one = command("attach", attach,
        "  tracer attach                 the only one, or a choice\n"
        "  tracer attach 4711            by pid\n"
        "  tracer attach ssh://gpu-7     over SSH: the events travel, not the screen\n"
        "  tracer attach ssh://gpu-7 ssh://gpu-8/vllm\n"
        "  tracer attach --list")  # fmt: skip
    add_slo(one)
    one.add_argument("targets", nargs="*", metavar="NAME|PID|ssh://HOST",
                     help="which one, as --list names it, or those of other hosts: ssh://[user@]host[:port][/NAME]; "
                          "tracer has to be there, in the PATH or where TRACER_RELAY says")  # fmt: skip
    one.add_argument("--list", action="store_true", help="print what can be joined and leave")
    add_outlet_arguments(one)

    one = command("show", show,
        "  tracer show 4711\n"
        "  tracer show 4711 --json | jq .requests\n"
        "  tracer show 4711 --request chat-12.1")  # fmt: skip
    add_slo(one)
    one.add_argument("target", metavar="FILE|TARGET",
                     help="a recorded trace, a pid, a name as in tracer attach --list, or a socket")  # fmt: skip
    one.add_argument("--json", action="store_true", help="as JSON")
    one.add_argument("--request", metavar="ID", help="one request closely")

    command("doctor", doctor, "  tracer doctor")
    add_recording(command, wanted)
    add_telemetry(command, wanted)
    add_comparison(command, wanted)
    add_exports(command)
    add_commands(command, wanted)
    add_web(command, wanted)
    add_completion(command, wanted)
    one = command("relay", relay,
        "  tracer attach ssh://HOST             what starts it over there\n"
        "  ssh HOST tracer relay                what that runs")  # fmt: skip
    one.add_argument("target", nargs="?", metavar="NAME|PID", help="which one, as tracer attach --list names it; "
                     "default: every process of this user that runs with the hooks on")  # fmt: skip
    return parser


def whole_parser() -> argparse.ArgumentParser:
    """The parser with every argument of every command; otherwise only the wanted command gets them all."""

    def commands(parser: argparse.ArgumentParser) -> Any:
        return next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction)).choices

    parser = _parser()
    found = commands(parser)
    for name in found:
        found[name] = commands(_parser(name))[name]
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. Raises SystemExit alone; with ``TRACER_DEBUG=1`` errors keep their traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser(given[0] if given else "").parse_args(given)
    if options.name is None:
        _parser().print_help()
        return 2
    try:
        code = int(options.call(options))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of our output has gone; what is left in the buffer must not be tried again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        from tracer.text import clean

        if os.environ.get("TRACER_DEBUG") == "1":
            raise
        reason = " ".join(clean(str(error), keep_newlines=True).split()) or type(error).__name__
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            import warnings

            reason = "no file descriptor is left: raise the limit (ulimit -n) or close what holds them"
            sys.unraisablehook = lambda _: None  # an event loop that could not be made complains as it is cleared away
            warnings.simplefilter("ignore")
        known = isinstance(error, (UsageError, OSError)) or type(error).__name__ in KNOWN
        print(f"tracer {options.name}: {reason if known else f'{type(error).__name__}: {reason}'}", file=sys.stderr)
        return 2 if known else 1
