"""Tables as the csv module and pyarrow read them."""

from __future__ import annotations

import csv
import io
import math
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_hooks.protocol.stages import Stage
from tests.effort import examples
from tests.export.exported import STATES, made, recorded, snapshot_of, stage_ms
from tests.export.test_perfetto import HOSTILE, hostile
from tracer.export.tables import TABLES, columns, write_csv, write_parquet
from tracer.export.whole import Whole
from tracer.format.text import clean
from tracer.state.trace_state import TraceState

DOCS = Path(__file__).parents[2] / "docs" / "export.md"
Rows = list[dict[str, Any]]


def from_csv(state: TraceState, table: str, **options: Any) -> Rows:
    file = io.BytesIO()
    write_csv(table, Whole(state, "t", **options), file)
    return list(csv.DictReader(io.StringIO(file.getvalue().decode("utf-8"), newline="")))


def from_parquet(state: TraceState, table: str, **options: Any) -> Rows:
    file = io.BytesIO()
    write_parquet(table, Whole(state, "t", **options), file)
    file.seek(0)
    rows: Rows = pyarrow.parquet.read_table(file).to_pylist()
    return rows


READERS = {"csv": from_csv, "parquet": from_parquet}


def total(rows: Rows, name: str) -> float:
    return math.fsum(float(row[name]) for row in rows if row[name] not in ("", None))


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("name", STATES)
def test_its_totals_are_the_states(kind: str, name: str) -> None:
    state, read = STATES[name](), READERS[kind]
    seen, totals = snapshot_of(state), Whole(state, "t").totals()
    requests = read(state, "requests")
    assert len(requests) == len(seen.requests) > 20
    assert sum(row["phase"] in ("done", "lost") for row in requests) == seen.finished
    assert total(requests, "prompt_tokens") == sum(
        view.prompt_tokens or 0 for view in seen.requests
    )
    assert total(requests, "output_tokens") == sum(view.output_tokens for view in seen.requests)
    for stage, ms in stage_ms(seen).items():
        assert total(requests, f"stage_{stage}_ms") == pytest.approx(ms)
    steps = read(state, "steps")
    assert len(steps) == sum(engine.steps for engine in seen.engines)
    tokens = read(state, "tokens")
    assert len(tokens) == totals.tokens == total(steps, "output_tokens") > 0
    assert total(tokens, "itl_ms") == pytest.approx(
        sum(
            sum(detail.itl_ms)
            for view in seen.requests
            if (detail := state.detail(view.id)) is not None
        )
    )


def test_parquet_has_types_and_nulls() -> None:
    rows = from_parquet(recorded(), "requests")
    waiting = [row for row in rows if row["phase"] == "waiting"]
    assert waiting and all(
        row["ttft_ms"] is None and row["stage_prefill_ms"] is None for row in waiting
    )
    assert isinstance(rows[0]["prompt_tokens"], int) and isinstance(rows[0]["received_ms"], float)
    assert rows[0]["streaming"] is True


@pytest.mark.parametrize("kind", READERS)
def test_text_is_there_when_asked_for(kind: str) -> None:
    assert "prompt_text" not in READERS[kind](made(), "requests")[0]
    rows = READERS[kind](made(), "requests", with_text=True)
    assert any(row["prompt_text"] == "x" * 20 for row in rows)
    assert any(row["output_text"] for row in rows)


@pytest.mark.parametrize("kind", READERS)
def test_one_request_comes_with_its_steps_and_tokens(kind: str) -> None:
    read, view = READERS[kind], snapshot_of(recorded()).requests[1]
    (row,) = read(recorded(), "requests", request=view.id)
    tokens = read(recorded(), "tokens", request=view.id)
    assert row["id"] == view.id and {token["request"] for token in tokens} == {view.id}
    steps = {
        (step["source"], str(step["n"])) for step in read(recorded(), "steps", request=view.id)
    }
    assert steps >= {(token["source"], str(token["step"])) for token in tokens}
    assert len(tokens) == view.output_tokens


FORMULA = st.one_of(
    HOSTILE, st.sampled_from(["=cmd|' /C calc'!A0", "+1", "-1+1", "@SUM(A1)", " =1", '"=1', "\t=1"])
)


@settings(max_examples=examples(40), deadline=None)
@given(FORMULA, FORMULA)
def test_no_spreadsheet_takes_a_cell_for_a_formula(name: str, other: str) -> None:
    (row,) = from_csv(hostile(name, other), "requests")
    assert row["rid"].removeprefix("'") == clean(name).removeprefix("'")
    for cell in row.values():
        assert not cell.lstrip().startswith(("=", "+", "-", "@", "\t", "\r", "|", "%"))
        assert cell == clean(cell)
    (plain,) = from_parquet(hostile(name, other), "requests")
    assert plain["rid"] == clean(name)


def test_the_page_lists_the_columns() -> None:
    sections = re.split(r"^### ", DOCS.read_text("utf-8"), flags=re.MULTILINE)
    for table in TABLES:
        (section,) = [text for text in sections if text.startswith(f"{table}\n")]
        listed = re.findall(r"^\| `([a-z0-9_]+)` \| (\w+) \|", section, re.MULTILINE)
        kinds = {"text": "string"}
        told = [(column.name, kinds.get(column.kind, column.kind))
                for column in columns(table, Whole(made(), "t", with_text=True))]  # fmt: skip
        per_stage = {
            f"stage_{stage.id}_{what}" for stage in Stage for what in ("ms", "wait_ms", "status")
        }
        assert [item for item in told if item[0] not in per_stage] == listed
