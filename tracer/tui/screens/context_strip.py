"""The first line: what engine, model and load the figures below are about, and whether they are
live."""

from __future__ import annotations

from rich.style import Style

from tracer.format import figures
from tracer.format.text import cell_width
from tracer.state.view import Snapshot
from tracer.state.view import engines_of as engines_of
from tracer.tui.toolkit.canvas import LABEL_ROOM, Canvas, Line, Row, label
from tracer.tui.toolkit.theme import Look

RECORDING = "REC"
"""Stands before the status, behind a bullet, while a file is being written."""


class ContextStrip(Canvas):
    """One row. Items shorten, then leave, from the least telling one on when the row gets
    narrow."""

    def __init__(self, look: Look, title: str = "") -> None:
        super().__init__(look, id="context")
        self.add_class("tile")
        self.fallback = title
        self.snapshot: Snapshot | None = None
        self.status = ""
        self.status_style: Style = look.good

    def show(self, snapshot: Snapshot | None, status: str, style: Style) -> None:
        """Draw the context of a snapshot and the status of the stream in its style."""
        before, self.snapshot = self.snapshot, snapshot
        told, self.status, self.status_style = (self.status, self.status_style), status, style
        if (
            told == (status, style)
            and before is not None
            and snapshot is not None
            and (
                before.engines is snapshot.engines
                and before.context is snapshot.context
                and before.failed == snapshot.failed
            )
        ):
            return  # the same snapshot, with the clock moved on
        self.repaint()

    def paint(self, width: int, height: int) -> list[Row]:
        look = self.look
        status = label(self.status)
        room = max(0, width - cell_width(status) - 3)
        items = _items(self.snapshot, self.fallback)
        failed = self.snapshot.failed if self.snapshot is not None else 0
        if failed:
            items.append((1, f"{failed:,} failed", f"{figures.count(failed)} failed"))
        chosen = [long for _, long, _ in items]
        # Shorten the least important first, then drop.
        order = sorted(range(len(items)), key=lambda i: -items[i][0])
        for index in order:
            if _total(chosen) <= room:
                break
            chosen[index] = items[index][2]
        for index in order:
            if _total(chosen) <= room:
                break
            chosen[index] = ""
        line = Line(width).add(" ", look.text)
        for index, text in enumerate(chosen):
            if not text:
                continue
            if line.used > 1:
                line.add(f" {look.glyphs.dot} ", look.faint)
            style = (
                look.bad
                if failed and index == len(chosen) - 1
                else look.accent
                if line.used == 1
                else look.text
            )
            line.add_text(text, style, ellipsis=look.glyphs.ellipsis)
        if status:
            line.fill_to(max(0, width - cell_width(status) - 1), look.text)
            if status[1:].startswith(RECORDING):
                mark, status = status[: len(RECORDING) + 1], status[len(RECORDING) + 1 :]
                line.add(mark, look.bad)
            line.add_text(status, self.status_style, ellipsis=look.glyphs.ellipsis)
        return [line.end(look.text)]


def _total(texts: list[str]) -> int:
    present = [cell_width(text) for text in texts if text]
    return sum(present) + 3 * max(0, len(present) - 1)


def _items(snapshot: Snapshot | None, fallback: str) -> list[tuple[int, str, str]]:
    """Return (how soon to give way, long form, short form) of each item, cleaned."""
    if snapshot is None:
        return [(0, label(fallback) or "tracer", "tracer")]
    items: list[tuple[int, str, str]] = []
    engines = engines_of(snapshot)
    context = snapshot.context
    if engines:
        engine = engines[0]
        name = f"{label(engine.name or engine.title)} {label(engine.version)}".strip()
        more = f" +{len(engines) - 1}" if len(engines) > 1 else ""
        model = label(engine.model[-LABEL_ROOM:].rstrip("/").rsplit("/", 1)[-1])
        items.append((1, name + more, label(engine.name or engine.title) + more))
        if model:
            items.append((0, f"{model} {label(engine.dtype)}".strip(), model))
        if engine.device:
            items.append((4, label(engine.device), label(engine.device)))
    else:
        items.append((0, label(fallback) or "tracer", label(fallback) or "tracer"))
        if not snapshot.engines:
            return items
    items.append(
        (
            2,
            f"{figures.rate(context.request_rate)} req/s",
            f"{figures.rate(context.request_rate)}/s",
        )
    )
    items.append(
        (
            3,
            f"{figures.count(context.concurrency)} open",
            f"{figures.count(context.concurrency)} open",
        )
    )
    for flag, name, short, weight in (
        (context.prefix_caching, "prefix cache", "cache", 5),
        (context.chunked_prefill, "chunked", "chunk", 6),
    ):
        if flag is not None:
            items.append(
                (weight, f"{name} {'on' if flag else 'off'}", f"{short} {'on' if flag else 'off'}")
            )
    window = figures.span(context.window_s)
    items.append((2, f"last {window}" if window != "all" else "whole trace", window))
    return items
