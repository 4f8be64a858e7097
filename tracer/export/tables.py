"""A trace as three tables: requests, steps, output tokens; as CSV files or as Parquet files.

Columns and their types are those of `docs/export.md`. Times are ms since the first event of the
trace, `wall` seconds since the epoch; what is not known is an empty cell, or null. A spreadsheet
takes a cell that begins with ``=``, ``+``, ``-`` or ``@`` for a formula: in CSV, text that does
gets an apostrophe in front of it, as spreadsheets themselves do.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Final, NamedTuple

from engine_hooks.protocol.clock import NS_PER_MS
from engine_hooks.protocol.stages import Stage
from tracer.export.whole import LARGEST, RequestRow, StepRow, Whole
from tracer.format.text import clean

TABLES: Final = ("requests", "steps", "tokens")
_ROWS: Final = 50_000
"""Rows in memory at a time while Parquet is written."""


class Column(NamedTuple):
    """`kind`: ``string``, ``text`` (kept with its line ends), ``int``, ``float`` or ``bool``."""

    name: str
    kind: str
    value: Callable[..., Any]


def columns(table: str, whole: Whole) -> list[Column]:
    """Return the columns of a table; those of text only where it was asked for."""
    makers = {"requests": _request_columns, "steps": _step_columns, "tokens": _token_columns}
    return makers[table](whole)


def rows(table: str, whole: Whole) -> Iterator[Any]:
    """Iterate over what `Column.value` is called with: requests, steps, or tokens each with the
    request's id."""
    if table == "requests":
        return iter(whole.requests)
    if table == "steps":
        return iter(whole.steps)
    return ((row.view.id, token) for row in whole.requests for token in whole.tokens(row))


def write_csv(table: str, whole: Whole, file: BinaryIO) -> None:
    """Write a header, then a line for each row; RFC 4180, UTF-8."""
    chosen = columns(table, whole)
    text = io.TextIOWrapper(file, "utf-8", newline="")
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow([column.name for column in chosen])
    writer.writerows([_cell(column, row) for column in chosen] for row in rows(table, whole))
    text.flush()
    text.detach()


def write_parquet(table: str, whole: Whole, file: BinaryIO) -> None:
    """Write a Zstandard-compressed file.

    Raises:
        ImportError: The `pyarrow` package is missing.
    """
    import pyarrow
    import pyarrow.parquet

    types = {"string": pyarrow.string(), "text": pyarrow.string(), "int": pyarrow.int64(),
             "float": pyarrow.float64(), "bool": pyarrow.bool_()}  # fmt: skip
    chosen = columns(table, whole)
    schema = pyarrow.schema([(column.name, types[column.kind]) for column in chosen])
    left = rows(table, whole)
    with pyarrow.parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        while batch := list(itertools.islice(left, _ROWS)):
            arrays = [
                pyarrow.array([_plain(column, row) for row in batch], field.type)
                for column, field in zip(chosen, schema, strict=True)
            ]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))


def _plain(column: Column, row: Any) -> Any:
    value = column.value(row)
    if isinstance(value, str):
        return clean(value, keep_newlines=column.kind == "text") or None
    if column.kind == "int" and value is not None:
        return min(int(value), LARGEST)
    return value


def _cell(column: Column, row: Any) -> Any:
    value = _plain(column, row)
    if isinstance(value, str) and value.lstrip()[:1] in _FORMULA:
        return "'" + value
    if isinstance(value, bool):
        return "true" if value else "false"
    return value


_FORMULA: Final = frozenset("=+-@|%＝＋－＠")
"""First characters that some spreadsheet takes for the start of a formula; tabs and line ends are
escaped before."""


def _request_columns(whole: Whole) -> list[Column]:
    def wall(row: RequestRow) -> float | None:
        return None if whole.anchor is None else whole.wall(row.view.received) / 1e9

    began = whole.began
    made = [
        *_view_columns("string", "id rid source phase"),
        Column("received_ms", "float", lambda row: (row.view.received - began) / NS_PER_MS),
        Column("wall", "float", wall),
        *_view_columns("string", "route client_id tenant model"),
        *_view_columns("bool", "streaming"),
        *_view_columns("int", "messages prompt_tokens cached_tokens output_tokens max_tokens"),
        *_view_columns("string", "finish_reason error"),
        *_view_columns("int", "status_code"),
        *_view_columns("bool", "disconnected incomplete"),
        *_view_columns("float", "queue_ms prefill_ms ttft_ms engine_ttft_ms tpot_ms e2e_ms"),
        *_view_columns("float", "unattributed_ms"),
        *_view_columns("int", "preemptions recomputed_tokens blocks body_bytes sent_bytes"),
    ]
    for stage in Stage:
        for name, kind in (("ms", "float"), ("wait_ms", "float"), ("status", "string")):
            made.append(Column(f"stage_{stage.id}_{name}", kind, _stage(stage, name)))
    if whole.with_text:
        made.append(Column("prompt_text", "text", lambda row: row.prompt_text))
        made.append(Column("output_text", "text", lambda row: row.output_text))
    return made


def _view_columns(kind: str, names: str) -> Iterator[Column]:
    """Columns that are called like what they show of a request or a step."""
    return (Column(name, kind, _view(name)) for name in names.split())


def _view(name: str) -> Callable[[RequestRow | StepRow], Any]:
    return lambda row: getattr(row.view, name)


def _stage(stage: Stage, name: str) -> Callable[[RequestRow], Any]:
    return lambda row: getattr(row.view.stages[stage - 1], name)


_PARTS: Final = ("schedule", "prepare", "embed", "layers", "head", "sample", "update")


def _step_columns(whole: Whole) -> list[Column]:
    began = whole.began

    def part(name: str) -> Callable[[StepRow], float | None]:
        return lambda row: dict(row.view.parts).get(name)

    return [
        *_view_columns("string", "source"),
        *_view_columns("int", "n"),
        Column("begin_ms", "float", lambda row: (row.view.begin - began) / NS_PER_MS),
        Column("token_ms", "float", lambda row: (row.t_token - began) / NS_PER_MS),
        Column("end_ms", "float", lambda row: (row.view.end - began) / NS_PER_MS),
        *_view_columns("int", "batch tokens prefill_tokens"),
        Column("output_tokens", "int", lambda row: row.output_tokens),
        *(Column(f"{name}_ms", "float", part(name)) for name in _PARTS),
        Column("used_blocks", "int", _view("used")),
        Column("cached_blocks", "int", _view("cached")),
        Column("free_blocks", "int", _view("free")),
        Column("num_waiting", "int", _view("waiting")),
        Column("num_running", "int", _view("running")),
    ]


def _token_columns(whole: Whole) -> list[Column]:
    began = whole.began
    return [
        Column("request", "string", lambda row: row[0]),
        Column("number", "int", lambda row: row[1].number),
        Column("t_ms", "float", lambda row: (row[1].t - began) / NS_PER_MS),
        Column("itl_ms", "float", lambda row: row[1].gap_ms),
        Column("batch", "int", lambda row: row[1].batch),
        Column("step", "int", lambda row: row[1].step),
        Column("source", "string", lambda row: row[1].source),
    ]
