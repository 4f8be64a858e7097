"""A trace as three tables: requests, steps, output tokens; as CSV files or as Parquet files.

Columns and their types are those of `docs/export.md`. Times are ms since the first event of the
trace, `wall` seconds since the epoch; what is not known is an empty cell, or null. A spreadsheet
takes a cell that begins with ``=``, ``+``, ``-`` or ``@`` for a formula: in CSV, text that does
gets an apostrophe in front of it, as spreadsheets themselves do.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, Final, NamedTuple

from engine_hooks.protocol.clock import NS_PER_MS
from engine_hooks.protocol.stages import Stage
from tracer.export.whole import RequestRow, StepRow, Token, Whole
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
    """The columns of a table; those of text only where it was asked for."""
    if table == "requests":
        return _request_columns(whole)
    return _step_columns(whole) if table == "steps" else _token_columns(whole)


def rows(table: str, whole: Whole) -> Iterator[tuple[Any, ...]]:
    """What `Column.value` is called with, row by row."""
    if table == "requests":
        yield from ((row,) for row in whole.requests)
    elif table == "steps":
        yield from ((row,) for row in whole.steps)
    else:
        yield from ((row, token) for row in whole.requests for token in whole.tokens(row))


def write_csv(table: str, whole: Whole, file: BinaryIO) -> None:
    """A header, then a row each; RFC 4180, UTF-8."""
    chosen = columns(table, whole)
    text = io.TextIOWrapper(file, "utf-8", newline="")
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow([column.name for column in chosen])
    writer.writerows(
        [_cell(column, arguments) for column in chosen] for arguments in rows(table, whole)
    )
    text.flush()
    text.detach()


def write_parquet(table: str, whole: Whole, file: BinaryIO) -> None:
    """Zstandard-compressed. Raises ImportError without the `pyarrow` package."""
    import pyarrow
    import pyarrow.parquet

    types = {"string": pyarrow.string(), "text": pyarrow.string(), "int": pyarrow.int64(),
             "float": pyarrow.float64(), "bool": pyarrow.bool_()}  # fmt: skip
    chosen = columns(table, whole)
    schema = pyarrow.schema([(column.name, types[column.kind]) for column in chosen])
    with pyarrow.parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        for batch in _batches(rows(table, whole)):
            arrays = [
                pyarrow.array([_plain(column, arguments) for arguments in batch], field.type)
                for column, field in zip(chosen, schema, strict=True)
            ]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))


def _batches(items: Iterable[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    batch: list[tuple[Any, ...]] = []
    for item in items:
        batch.append(item)
        if len(batch) == _ROWS:
            yield batch
            batch = []
    if batch:
        yield batch


def _plain(column: Column, arguments: tuple[Any, ...]) -> Any:
    value = column.value(*arguments)
    if isinstance(value, str):
        return clean(value, keep_newlines=column.kind == "text") or None
    if column.kind == "int" and value is not None:
        return min(int(value), (1 << 63) - 1)
    return value


def _cell(column: Column, arguments: tuple[Any, ...]) -> Any:
    value = _plain(column, arguments)
    if isinstance(value, str) and value.lstrip()[:1] in _FORMULA:
        return "'" + value
    if isinstance(value, bool):
        return "true" if value else "false"
    return value


_FORMULA: Final = frozenset("=+-@|%＝＋－＠")
"""First characters that some spreadsheet takes for the begin of a formula; tabs and line ends are
escaped before."""

# --- the tables -----------------------------------------------------------------------------------


def _request_columns(whole: Whole) -> list[Column]:
    began = whole.began
    made = [
        Column("id", "string", lambda row: row.view.id),
        Column("rid", "string", lambda row: row.view.rid),
        Column("source", "string", lambda row: row.view.source),
        Column("phase", "string", lambda row: row.view.phase.value),
        Column("received_ms", "float", lambda row: (row.view.received - began) / NS_PER_MS),
        Column(
            "wall",
            "float",
            lambda row: None if whole.anchor is None else whole.wall(row.view.received) / 1e9,
        ),
        *(
            Column(name, "string", _view(name))
            for name in ("route", "client_id", "tenant", "model")
        ),
        Column("streaming", "bool", _view("streaming")),
        *(
            Column(name, "int", _view(name))
            for name in (
                "messages",
                "prompt_tokens",
                "cached_tokens",
                "output_tokens",
                "max_tokens",
            )
        ),
        Column("finish_reason", "string", _view("finish_reason")),
        Column("error", "string", _view("error")),
        Column("status_code", "int", _view("status_code")),
        Column("disconnected", "bool", _view("disconnected")),
        Column("incomplete", "bool", _view("incomplete")),
        *(
            Column(name, "float", _view(name))
            for name in (
                "queue_ms",
                "prefill_ms",
                "ttft_ms",
                "engine_ttft_ms",
                "tpot_ms",
                "e2e_ms",
                "unattributed_ms",
            )
        ),
        *(
            Column(name, "int", _view(name))
            for name in ("preemptions", "recomputed_tokens", "blocks", "body_bytes", "sent_bytes")
        ),
    ]
    for stage in Stage:
        made.append(Column(f"stage_{stage.id}_ms", "float", _stage(stage, "ms")))
        made.append(Column(f"stage_{stage.id}_wait_ms", "float", _stage(stage, "wait_ms")))
        made.append(Column(f"stage_{stage.id}_status", "string", _stage(stage, "status")))
    if whole.with_text:
        made.append(Column("prompt_text", "text", lambda row: row.prompt_text))
        made.append(Column("output_text", "text", lambda row: row.output_text))
    return made


def _view(name: str) -> Callable[[RequestRow], Any]:
    return lambda row: getattr(row.view, name)


def _stage(stage: Stage, name: str) -> Callable[[RequestRow], Any]:
    def value(row: RequestRow) -> Any:
        found = getattr(row.view.stages[stage - 1], name)
        return found.value if name == "status" else found

    return value


_PARTS: Final = ("schedule", "prepare", "embed", "layers", "head", "sample", "update")


def _step_columns(whole: Whole) -> list[Column]:
    began = whole.began

    def part(name: str) -> Callable[[StepRow], float | None]:
        return lambda row: dict(row.view.parts).get(name)

    return [
        Column("source", "string", lambda row: row.view.source),
        Column("n", "int", lambda row: row.view.n),
        Column("begin_ms", "float", lambda row: (row.view.begin - began) / NS_PER_MS),
        Column("token_ms", "float", lambda row: (row.t_token - began) / NS_PER_MS),
        Column("end_ms", "float", lambda row: (row.view.end - began) / NS_PER_MS),
        Column("batch", "int", lambda row: row.view.batch),
        Column("tokens", "int", lambda row: row.view.tokens),
        Column("prefill_tokens", "int", lambda row: row.view.prefill_tokens),
        Column("output_tokens", "int", lambda row: sum(member.produced for member in row.members)),
        *(Column(f"{name}_ms", "float", part(name)) for name in _PARTS),
        Column("used_blocks", "int", lambda row: row.view.used),
        Column("cached_blocks", "int", lambda row: row.view.cached),
        Column("free_blocks", "int", lambda row: row.view.free),
        Column("num_waiting", "int", lambda row: row.view.waiting),
        Column("num_running", "int", lambda row: row.view.running),
    ]


def _token_columns(whole: Whole) -> list[Column]:
    began = whole.began

    def told(value: Callable[[Token], Any]) -> Callable[[RequestRow, Token], Any]:
        return lambda row, token: value(token)

    return [
        Column("request", "string", lambda row, token: row.view.id),
        Column("number", "int", told(lambda token: token.number)),
        Column("t_ms", "float", told(lambda token: (token.t - began) / NS_PER_MS)),
        Column("itl_ms", "float", told(lambda token: token.gap_ms)),
        Column("batch", "int", told(lambda token: token.batch)),
        Column("step", "int", told(lambda token: token.step)),
        Column("source", "string", told(lambda token: token.source)),
    ]
