"""`tracer export` as it is called, and the files that it leaves."""

from __future__ import annotations

import csv
import io
import json
import resource
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.export.exported import RECORDING, made, snapshot_of
from tracer.cli.export import FORMATS, export_state
from tracer.cli.main import main
from tracer.export.extras import install_command
from tracer.export.otlp import otlp_documents, otlp_message
from tracer.export.output import ExportError, Output
from tracer.export.perfetto import perfetto_packets
from tracer.export.tables import write_csv
from tracer.export.whole import LARGEST, Whole
from tracer.replay.cursor import load

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*words: str | Path) -> int:
    return main([str(word) for word in words])


def refused(capsys: Capture, *words: str | Path) -> str:
    """The one line with which a command is refused."""
    assert run(*words) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    return told.err


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_written_beside_the_name_of_the_trace(
    kind: str, tmp_path: Path, capsys: Capture
) -> None:
    assert run("export", RECORDING, "--to", kind) == 0
    (made_file,) = tmp_path.iterdir()
    assert made_file.name == "transformers-mixed" + FORMATS[kind]
    totals = load(RECORDING).snapshot()
    told = capsys.readouterr().err
    assert f"requests {totals.total}, steps " in told
    assert f"output tokens {sum(view.output_tokens for view in totals.requests):,}" in told
    names = [made_file] if made_file.is_file() else sorted(made_file.iterdir())
    assert all(path.stat().st_size > 1000 and path.stat().st_mode & 0o077 == 0 for path in names)
    if kind in ("csv", "parquet"):
        assert [path.name for path in names] == [
            f"{table}.{kind}" for table in ("requests", "steps", "tokens")
        ]


def test_nothing_is_replaced_unless_asked_for(tmp_path: Path, capsys: Capture) -> None:
    for kind, place in (("svg", tmp_path / "a.svg"), ("csv", tmp_path / "tables")):
        words = ("export", RECORDING, "--to", kind, "-o", place)
        assert run(*words) == 0
        kept = place if place.is_file() else place / "steps.csv"
        kept.write_text("mine")
        capsys.readouterr()
        assert "exists already" in refused(capsys, *words)
        assert kept.read_text() == "mine"
        assert run(*words, "--force") == 0
        assert kept.read_text() != "mine"
    assert not list(tmp_path.rglob("*.part"))


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, capsys: Capture) -> None:
    assert "no such file" in refused(
        capsys, "export", RECORDING, "--to", "svg", "-o", tmp_path / "none" / "x.svg"
    )
    (tmp_path / "folder").mkdir()
    assert "it is a folder" in refused(
        capsys, "export", RECORDING, "--to", "svg", "-o", tmp_path / "folder"
    )
    (tmp_path / "file").touch()
    assert "file" in refused(capsys, "export", RECORDING, "--to", "csv", "-o", tmp_path / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file may get longer than 20,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("kind", ["csv", "parquet", "perfetto", "html"])
def test_a_disk_that_gets_full_leaves_what_was_there(
    kind: str, tmp_path: Path, capsys: Capture, small_disk: None
) -> None:
    there = tmp_path / "x"
    if kind != "csv" and kind != "parquet":
        there.write_text("mine")
    assert "file too large" in refused(
        capsys, "export", RECORDING, "--to", kind, "-o", there, "--force"
    )
    assert [path.name for path in tmp_path.iterdir()] == (["x"] if there.exists() else [])
    assert not there.exists() or there.read_text() == "mine"


def test_files_of_one_export_come_together_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Output(overwrite=False) as output:
        output.folder(tmp_path / "new")
        with output.file(tmp_path / "new" / "a") as file:
            file.write(b"a")
        assert 1 / 0
    assert not list(tmp_path.iterdir())
    with pytest.raises(ExportError), Output(overwrite=False) as output:
        with output.file(tmp_path / "a") as file:
            file.write(b"ours")
        (tmp_path / "a").write_text("came meanwhile")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
        ("a", "came meanwhile")
    ]


@pytest.mark.parametrize(
    ("kind", "module"),
    [
        ("perfetto", "perfetto.protos.perfetto.trace"),
        ("parquet", "pyarrow"),
        ("otlp", "google.protobuf.json_format"),
    ],
)
def test_a_missing_package_is_named_with_the_way_to_get_it(
    kind: str, module: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    more = ("--endpoint", "http://127.0.0.1:1") if kind == "otlp" else ()
    line = refused(capsys, "export", RECORDING, "--to", kind, *more)
    assert install_command("export") in line
    assert not list(tmp_path.iterdir())


def test_one_request_is_exported_alone(tmp_path: Path, capsys: Capture) -> None:
    assert run("export", RECORDING, "--to", "otlp", "--request", "chat-2.1", "-o", "one") == 0
    (line,) = (tmp_path / "one").read_text().splitlines()
    spans = json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert len({span["traceId"] for span in spans}) == 1
    capsys.readouterr()
    told = refused(capsys, "export", RECORDING, "--to", "svg", "--request", "nobody")
    assert "no request nobody; the latest are" in told


def test_wrong_usage_is_told_in_one_line(tmp_path: Path, capsys: Capture) -> None:
    assert "use it with --to otlp" in refused(
        capsys, "export", RECORDING, "--to", "svg", "--endpoint", "http://x"
    )
    told = refused(capsys, "export", RECORDING, "--to", "otlp", "--endpoint", "http://x", "-o", "y")
    assert "cannot be used together" in told
    (tmp_path / "bad.trace").write_bytes(b"\x1b[31mno trace")
    assert "is not a trace file" in refused(capsys, "export", "bad.trace", "--to", "svg")


def test_text_is_only_there_when_asked_for(tmp_path: Path, capsys: Capture) -> None:
    assert any(request.prompt_text for request in made().requests.order)
    secret = "xxxxxxxxxxxxxxxxxxxx"
    for kind in ("perfetto", "chrome", "otlp", "html", "svg"):
        without, having = tmp_path / f"{kind}.0", tmp_path / f"{kind}.1"
        export_state(made(), kind, without, name="t")
        export_state(made(), kind, having, name="t", with_text=True)
        assert secret not in without.read_text("utf-8", "replace"), kind
        assert (secret in having.read_text("utf-8", "replace")) == (kind != "svg"), kind
    assert run("export", RECORDING, "--to", "html", "--with-text") == 0
    assert "there is no text in this trace" in capsys.readouterr().err


def test_an_empty_trace_can_be_exported(tmp_path: Path) -> None:
    from tracer.state.trace_state import TraceState

    for kind in FORMATS:
        whole = export_state(TraceState(), kind, tmp_path / kind, name="empty")
        assert whole.totals().requests == 0 and (tmp_path / kind).exists()


def test_a_live_state_is_exported_as_far_as_it_goes_back(tmp_path: Path) -> None:
    from tests.state.test_properties import fold
    from tests.state.traces import simulate

    trace = simulate(5, requests=20, blocks=40, output=60)
    state = fold(trace.headers, trace.events, keep_steps=8)
    kept = sum(len(source.batch.history) for source in state.sources.values())
    for kind in FORMATS:
        totals = export_state(state, kind, tmp_path / kind, name="live").totals()
        assert totals.steps == kept < sum(engine.steps for engine in snapshot_of(state).engines)
        assert (
            totals.tokens
            == totals.output_tokens
            == sum(v.output_tokens for v in snapshot_of(state).requests)
        )


def test_totals_are_the_states() -> None:
    seen, totals = snapshot_of(made()), Whole(made(), "t").totals()
    assert (totals.requests, totals.finished) == (len(seen.requests), seen.finished)
    assert totals.output_tokens == sum(view.output_tokens for view in seen.requests)


def test_a_number_that_no_format_holds_is_written_as_the_largest() -> None:
    whole = Whole(made(), "t")
    row = whole.requests[0]
    whole.requests[0] = replace(row, view=replace(row.view, max_tokens=1 << 70))
    assert LARGEST == 2**63 - 1
    span = json.dumps(next(iter(otlp_documents(whole))))
    assert f'"key": "gen_ai.request.max_tokens", "value": {{"intValue": "{LARGEST}"}}' in span
    assert otlp_message(json.loads(span))
    assert any(b"max_tokens" in packet for packet in perfetto_packets(whole))
    file = io.BytesIO()
    write_csv("requests", whole, file)
    (first, *_) = csv.DictReader(io.StringIO(file.getvalue().decode()))
    assert first["max_tokens"] == str(LARGEST)
