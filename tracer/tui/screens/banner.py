"""What must not be overlooked, in words: a dead or stalled engine, lost events, hooks that
failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_hooks.protocol.stamps import set_aside_line
from tracer.format import figures
from tracer.state.view import Snapshot
from tracer.tui.toolkit.canvas import Canvas, Line, Row
from tracer.tui.toolkit.theme import Look

if TYPE_CHECKING:
    from tracer.monitor.monitor import Monitor


@dataclass(frozen=True, slots=True)
class Notice:
    """One line of the banner; `grave` when the engine itself is in trouble."""

    text: str
    grave: bool


def notices_of(snapshot: Snapshot | None) -> tuple[Notice, ...]:
    """Return everything in a snapshot that calls for a banner, gravest first."""
    if snapshot is None:
        return ()
    found: list[Notice] = []
    for engine in snapshot.engines:
        name = engine.title or engine.name or engine.source
        if engine.status == "dead":
            found.append(Notice(f"{name} is dead: {engine.reason or 'it gave no reason'}", True))
        elif not engine.alive:
            found.append(
                Notice(
                    f"{name} is gone: {engine.reason or 'its stream ended'}",
                    engine.status != "stopped",
                )
            )
        elif engine.stalled:
            found.append(Notice(f"{name} stalled: {engine.stalled}", True))
    losses = snapshot.losses
    if losses.events or losses.incomplete_requests:
        text = f"{figures.count(losses.events)} events lost"
        if losses.incomplete_requests:
            text += f", {figures.count(losses.incomplete_requests)} requests incomplete"
        found.append(Notice(text, False))
    if losses.unknown:
        found.append(
            Notice(f"{figures.count(losses.unknown)} events of a newer tracer were left out", False)
        )
    if losses.set_aside:
        found.append(Notice(set_aside_line(losses.set_aside), False))
    found.extend(Notice(f"hook failed: {fault}", False) for fault in losses.hook_faults[-1:])
    return tuple(sorted(found, key=lambda notice: not notice.grave))


def alerted(monitor: Monitor, others: tuple[Notice, ...]) -> tuple[Notice, ...]:
    """Return `others` with a notice for each alert that fires."""
    if monitor.alerts is None:
        return others
    firing = [Notice(f"alert: {alert.name}: {alert.reason}", alert.severity == "critical")
              for alert in monitor.alerts.firing]  # fmt: skip
    return tuple(sorted((*firing, *others), key=lambda notice: not notice.grave))


class Banner(Canvas):
    """A row for each notice, as many as `rows` says; the screen gives it none when all is well."""

    MOST = 3

    def __init__(self, look: Look) -> None:
        super().__init__(look, id="banner")
        self.add_class("tile")
        self.notices: tuple[Notice, ...] = ()

    @property
    def rows(self) -> int:
        """Rows wanted."""
        return min(self.MOST, len(self.notices))

    def show(self, notices: tuple[Notice, ...]) -> bool:
        """Take on notices; True when the height wanted has changed."""
        before = self.rows
        if notices != self.notices:
            self.notices = notices
            self.repaint()
        return before != self.rows

    def paint(self, width: int, height: int) -> list[Row]:
        look = self.look
        rows: list[Row] = []
        for notice in self.notices[:height]:
            style = look.error_banner if notice.grave else look.warn_banner
            line = Line(width).add(f" {look.glyphs.warning} ", style)
            line.add_text(notice.text, style, ellipsis=look.glyphs.ellipsis)
            rows.append(line.end(style))
        hidden = len(self.notices) - len(rows)
        if hidden > 0 and rows and height > 0:
            notice = self.notices[height - 1]
            style = look.error_banner if notice.grave else look.warn_banner
            line = Line(width).add(f" {look.glyphs.warning} and {hidden + 1} more: ", style)
            rows[-1] = line.add_text(notice.text, style, ellipsis=look.glyphs.ellipsis).end(style)
        return rows
