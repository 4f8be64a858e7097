"""What the tracer says while it works."""

from __future__ import annotations

import io

from tracer.cli.status_line import StatusLine


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_is_written_over_on_a_terminal() -> None:
    stream = Terminal()
    status = StatusLine(stream)
    status.report("fetching 10 %", passing=True)
    status.report("fetching 90 %", passing=True)
    status.report("done")
    assert stream.getvalue() == (
        "tracer: fetching 10 %\x1b[K\r\x1b[Ktracer: fetching 90 %\x1b[K\r\x1b[Ktracer: done\n"
    )


def test_progress_in_a_file_is_a_line_now_and_then_without_escapes() -> None:
    stream = io.StringIO()
    status = StatusLine(stream)
    for share in range(100):
        status.report(f"fetching {share} %", passing=True)
    status.report("done")
    assert stream.getvalue() == "tracer: fetching 0 %\ntracer: done\n"


def test_an_engine_s_line_cannot_steer_the_terminal() -> None:
    stream = Terminal()
    StatusLine(stream).pass_on("\x1b]52;c;aGk=\x07 \x9b2J red\x1b[31m \u202eevil")
    assert not any(bad in stream.getvalue() for bad in "\x1b\x07\x9b\u202e")
    assert stream.getvalue() == "\\x1b]52;c;aGk=\\x07 \\x9b2J red\\x1b[31m \\u202eevil\n"


def test_nothing_is_written_while_a_screen_is_shown() -> None:
    stream = Terminal()
    status = StatusLine(stream)
    told: list[tuple[str, bool]] = []
    status.on_screen = lambda text, passing: told.append((text, passing))
    status.report("loading", passing=True)
    status.report("serving")
    status.pass_on("engine output")
    assert stream.getvalue() == ""
    assert told == [("loading", True), ("serving", False)]


def test_a_stream_that_cannot_hold_a_character_gets_its_number() -> None:
    raw = io.BytesIO()
    status = StatusLine(io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    status.report("loading … 模型")
    assert raw.getvalue() == b"tracer: loading \\u2026 \\u6a21\\u578b\n"


def test_a_stream_that_is_closed_ends_nothing() -> None:
    stream = io.StringIO()
    status = StatusLine(stream)
    stream.close()
    status.report("nobody hears this")
    status.pass_on("nor this")
    assert stream.closed
