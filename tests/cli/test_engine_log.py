"""What an engine writes: read along, bounded, kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tracer.launch.engine_log import FILES_KEPT, LINES_KEPT, LONGEST_LINE, EngineLog, new_log


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "engine.log"
    file.touch()
    return file


def test_lines_appear_as_they_are_written(path: Path) -> None:
    told: list[str] = []
    log = EngineLog(path, told.append)
    append(path, b"one\ntw")
    log.read()
    assert log.lines == ["one"]
    append(path, b"o\nthree\n")
    log.read()
    assert log.lines == told == ["one", "two", "three"]


def test_the_last_line_counts_even_when_it_is_unfinished(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"Traceback\nValueError: no newline at the end")
    log.close()
    assert log.lines == ["Traceback", "ValueError: no newline at the end"]
    log.close()
    log.read()
    assert len(log.lines) == 2, "closed is closed: nothing is read twice"


def test_a_progress_bar_is_shown_in_its_last_state(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"\r 0%|    |\r50%|##  |\r100%|####|\r\nready\r\n")
    log.read()
    assert log.lines == ["100%|####|", "ready"]


def test_bytes_that_are_no_text_do_no_harm(path: Path) -> None:
    log = EngineLog(path)
    append(path, b"\xff\xfe\x00\n\x1b]0;title\x07\n")
    log.read()
    assert log.lines == ["\ufffd\ufffd\x00", "\x1b]0;title\x07"]


def test_an_endless_line_takes_bounded_memory(path: Path) -> None:
    log = EngineLog(path)
    for _ in range(8):
        append(path, b"x" * 1_000_000)
        log.read()
    append(path, b"\nnext\n")
    log.read()
    assert [len(line) for line in log.lines] == [LONGEST_LINE + 1, 4]
    assert len(log._partial) <= 4 * LONGEST_LINE


def test_only_recent_lines_are_kept(path: Path) -> None:
    log = EngineLog(path)
    total = 5 * LINES_KEPT
    append(path, b"".join(b"%d\n" % number for number in range(total)))
    log.read()
    assert LINES_KEPT <= len(log.lines) <= 2 * LINES_KEPT
    assert log.lines[-1] == str(total - 1)
    assert log.lines == [str(number) for number in range(total - len(log.lines), total)]


def test_a_file_that_is_gone_has_nothing_new(tmp_path: Path) -> None:
    log = EngineLog(tmp_path / "never-there.log")
    log.read()
    log.close()
    assert log.lines == []


def test_a_new_log_is_private_and_old_ones_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACER_LOG_DIR", str(tmp_path))
    for number in range(FILES_KEPT + 5):
        path = new_log(f"run-{number}")
        os.utime(path, (number, number))
    assert path.stat().st_mode & 0o777 == 0o600
    kept = {file.stem for file in tmp_path.glob("*.log")}
    assert kept == {f"run-{number}" for number in range(5, FILES_KEPT + 5)}


def test_a_new_log_of_the_same_name_starts_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACER_LOG_DIR", str(tmp_path))
    new_log("run-1").write_text("of an earlier process with this pid\n")
    assert new_log("run-1").read_text() == ""
