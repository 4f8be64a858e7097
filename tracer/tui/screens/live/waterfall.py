"""The list of requests: one row each, with its bar on a time axis that all of them share and its
clock at the right.

Columns depend on the width only, never on values, so that nothing jumps. Rows of finished requests
are drawn once a page of the axis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.message import Message

from engine_hooks.protocol.stages import STAGES, Stage
from tracer.state.view import Phase, RequestView, Snapshot
from tracer.tui.listing import Listing
from tracer.tui.naming import phase_text, short_id
from tracer.tui.screens.live.legend import legend
from tracer.tui.toolkit import figures
from tracer.tui.toolkit.axis import SHORTEST, PageAxis, Tick
from tracer.tui.toolkit.bar import UNATTRIBUTED, WAIT, Bars, Stretch
from tracer.tui.toolkit.canvas import Line, Row, blank
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import Look

INTERLACED_FROM = (16, 40)
"""With more live requests in sight than the first, each row moves in every other frame; with more
than the second, in every third: nobody sees it, and the cost of a frame does not rise with them."""
SORT_OF_COLUMN = {
    "id": "received",
    "prompt": "prompt",
    "out": "output",
    "phase": "phase",
    "ms": "e2e",
}


@dataclass(frozen=True, slots=True)
class Columns:
    """Where each column lies, for one width: (first cell, cells). Zero cells: not shown."""

    id: tuple[int, int]
    prompt: tuple[int, int]
    hit: tuple[int, int]
    out: tuple[int, int]
    phase: tuple[int, int]
    bar: tuple[int, int]
    ms: tuple[int, int]

    @classmethod
    def of(cls, width: int) -> Columns:
        """The columns for a list of `width` cells."""
        if width >= 118:
            sizes = {"id": 16, "prompt": 7, "hit": 4, "out": 6, "phase": 13, "ms": 10}
        elif width >= 90:
            sizes = {"id": 11, "prompt": 6, "hit": 4, "out": 6, "phase": 12, "ms": 9}
        elif width >= 64:
            sizes = {"id": 10, "prompt": 6, "hit": 0, "out": 5, "phase": 11, "ms": 8}
        elif width >= 44:
            sizes = {"id": 8, "prompt": 0, "hit": 0, "out": 5, "phase": 0, "ms": 8}
        elif width >= 26:
            sizes = {"id": 6, "prompt": 0, "hit": 0, "out": 0, "phase": 0, "ms": 8}
        else:
            sizes = {
                "id": max(0, min(8, width - 1)),
                "prompt": 0,
                "hit": 0,
                "out": 0,
                "phase": 0,
                "ms": 0,
            }
        at = 1  # the selection marker
        places: dict[str, tuple[int, int]] = {}
        for name in ("id", "prompt", "out", "hit", "phase"):
            if name == "out" and sizes["prompt"]:
                at += 1  # the arrow between prompt and output
            places[name] = (at, sizes[name])
            at += sizes[name] + (1 if sizes[name] else 0)
        ms = sizes["ms"]
        end = width - (ms + 2 if ms else 0)
        places["bar"] = (at, max(0, end - at))
        places["ms"] = (width - ms - 1, ms)
        return cls(**places)


class Waterfall(Panel):
    """The requests as bars. It shows what it is given and says what the user did; it asks for
    nothing itself."""

    class Moved(Message):
        """The user selected another request or scrolled."""

    class Opened(Message):
        """The user wants to see one request closely."""

        def __init__(self, view: RequestView) -> None:
            super().__init__()
            self.view = view

    def __init__(self, look: Look, listing: Listing) -> None:
        super().__init__(look, id="waterfall")
        self.listing = listing
        self.axis = PageAxis()
        self.snapshot: Snapshot | None = None
        self.waiting_text: tuple[str, ...] = ()
        """What is said while there is no request to show."""
        self.turns = 1
        """In one of how many frames each row moves: more, the more live requests are in sight."""
        self.expect: Callable[[RequestView], float | None] = lambda view: None
        """ms after which a request should have got so far; None where nothing tells."""
        self.ticks = False
        """Whether bars carry a tick at what was expected of them."""
        self._turn: int | None = None
        self._cache: dict[
            tuple[str, int], tuple[RequestView, tuple[object, ...], list[Segment]]
        ] = {}

    # --- data

    @property
    def header_rows(self) -> int:
        """Title and column names."""
        return 2 if self.size.height >= 8 else 1

    @property
    def legend_rows(self) -> int:
        """The legend of stages takes a row where there is room."""
        width, height = self.size
        return 1 if height >= 18 and width >= 60 else 0

    @property
    def visible_rows(self) -> int:
        """How many requests fit."""
        return max(1, self.size.height - self.header_rows - self.legend_rows)

    def show(
        self, snapshot: Snapshot, waiting_text: tuple[str, ...] = (), frame: int | None = None
    ) -> None:
        """Draw a snapshot whose requests are those that the listing asked for. With the number of
        the `frame`, of many live requests only those move whose turn it is."""
        self.snapshot = snapshot
        live = sum(view.closed is None for view in self.listing.rows)
        self.turns = 1 + sum(live > enough for enough in INTERLACED_FROM)
        self._turn = None if frame is None or self.turns == 1 else frame % self.turns
        self.waiting_text = waiting_text
        rows = self.listing.rows
        if rows and self.size:
            latest = max(snapshot.now if view.closed is None else view.closed for view in rows)
            begins = sorted(view.received for view in rows)
            # Old stragglers must not squeeze everyone else: their bars begin before the page, with
            # a mark.
            self.axis.fit(
                begins[len(begins) // 8], latest, SHORTEST if len(rows) > 30 else SHORTEST // 2
            )
        self.repaint()

    # --- drawing

    def title(self) -> str:
        snapshot, listing = self.snapshot, self.listing
        if snapshot is None:
            return "requests"
        text = f"requests {figures.count(snapshot.total)}"
        if listing.text:
            text += f" matching {listing.text}"
        if listing.live_only:
            text += " live only"
        if not listing.by_arrival:
            text += f" by {listing.sort}"
        if listing.flipped:
            text += " reversed" if not listing.by_arrival else " newest first"
        return text

    def note(self) -> list[Segment]:
        listing, glyphs = self.listing, self.look.glyphs
        parts: list[Segment] = []
        older = listing.total - listing.offset - len(listing.rows)
        above, below = (older, listing.offset) if listing.newest_last else (listing.offset, older)
        if above > 0:
            parts.append(Segment(f"{glyphs.up} {figures.short_count(above)}", self.look.dim))
        if below > 0:
            gap = "  " if parts else ""
            parts.append(
                Segment(f"{gap}{glyphs.down} {figures.short_count(below)}", self.look.warn)
            )
        return parts

    def body(self, width: int, height: int) -> list[Row]:
        look = self.look
        columns = Columns.of(width)
        snapshot = self.snapshot
        bar_at, bar_cells = columns.bar
        began = snapshot.began if snapshot else 0
        ticks = self.axis.ticks(bar_cells, began) if snapshot and self.listing.rows else []
        grid = self._grid(bar_cells, ticks)
        rows: list[Row] = []
        if self.header_rows > 1:
            rows.append(self._column_names(width, columns, ticks))
        legend_rows = self.legend_rows
        room = height - len(rows) - legend_rows
        if not self.listing.rows:
            rows.extend(self._nothing_yet(width, room))
        elif snapshot is not None:
            bars = Bars(look, bar_cells, grid)
            context = (width, self.axis.version, grid, look, self.ticks)
            cache: dict[tuple[str, int], tuple[RequestView, tuple[object, ...], list[Segment]]] = {}
            for view in self.listing.rows[: max(0, room)]:
                chosen = view.key == self.listing.selected
                stamp = (*context, chosen, self.has_focus if chosen else False)
                found = self._cache.get(view.key)
                if found is not None and found[1] == stamp and self._still(found[0], view):
                    cache[view.key] = found
                else:
                    cache[view.key] = (
                        view,
                        stamp,
                        self._row(view, snapshot.now, width, columns, bars, chosen),
                    )
                rows.append(cache[view.key][2])
            self._cache = cache
        while len(rows) < height - legend_rows:
            line = Line(width).fill_to(bar_at, look.text)
            rows.append(
                line.put(grid, look.grid).end(look.text)
                if self.listing.rows
                else blank(width, look.text)
            )
        if legend_rows:
            rows.append(legend(look, width, expected=self.ticks))
        return rows

    def _still(self, drawn: RequestView, view: RequestView) -> bool:
        """Whether what was drawn of a request will do for another frame."""
        if view.closed is not None:
            return drawn is view
        return (
            self._turn is not None
            and view.key[1] % self.turns != self._turn
            and drawn.phase is view.phase
        )

    def _grid(self, cells: int, ticks: list[Tick]) -> str:
        text = [" "] * cells
        for tick in ticks:
            if 0 < tick.column < cells:
                text[tick.column] = self.look.glyphs.grid
        return "".join(text)

    def _column_names(self, width: int, columns: Columns, ticks: list[Tick]) -> Row:
        look, listing = self.look, self.listing
        names = {
            "id": "id",
            "prompt": "prompt",
            "out": "out",
            "hit": "hit",
            "phase": "phase",
            "ms": "ms",
        }
        line = Line(width)
        for name, label in names.items():
            at, cells = getattr(columns, name)
            if not cells:
                continue
            if name == "ms":
                self._tick_labels(line, columns, ticks)
            sorted_here = SORT_OF_COLUMN.get(name) == listing.sort
            arrow = look.glyphs.up if (listing.flipped != listing.by_arrival) else look.glyphs.down
            text = (label + arrow if sorted_here else label)[:cells]
            style = look.bold if sorted_here else look.dim
            line.fill_to(at, look.dim).put(
                text.ljust(cells) if name in ("id", "phase") else text.rjust(cells), style
            )
        if not columns.ms[1]:
            self._tick_labels(line, columns, ticks)
        return line.end(look.dim)

    def _tick_labels(self, line: Line, columns: Columns, ticks: list[Tick]) -> None:
        at, cells = columns.bar
        line.fill_to(at, self.look.dim)
        for tick in ticks:
            if at + tick.column >= line.used and tick.column + len(tick.label) + 1 <= cells:
                line.fill_to(at + tick.column, self.look.dim)
                line.put(self.look.glyphs.tick + tick.label, self.look.dim)
        line.fill_to(at + cells, self.look.dim)

    def _row(
        self, view: RequestView, now: int, width: int, columns: Columns, bars: Bars, chosen: bool
    ) -> list[Segment]:
        look, palette = self.look, self.look.palette
        back = palette.selected if chosen else palette.back
        live = view.closed is None and view.phase not in (Phase.DONE, Phase.LOST)

        def on(style: Style) -> Style:
            return look.on(style, back, reverse=chosen) if chosen else style

        base = on(look.text if live else look.dim)
        dim = on(look.dim)
        line = Line(width)
        line.put(look.glyphs.select if chosen else " ", on(look.accent) if chosen else base)
        line.put_segments(
            [Segment(short_id(view.id, columns.id[1], look.glyphs.ellipsis), base)], columns.id[1]
        )
        if columns.prompt[1]:
            line.fill_to(columns.prompt[0], base)
            line.put(
                figures.count(view.prompt_tokens).rjust(columns.prompt[1])[-columns.prompt[1] :],
                base,
            )
        if columns.out[1]:
            line.fill_to(columns.out[0] - 2, base)
            line.put(f" {look.glyphs.arrow}" if columns.prompt[1] else "  ", dim)
            line.put(
                figures.count(view.output_tokens).rjust(columns.out[1])[-columns.out[1] :], base
            )
        if columns.hit[1]:
            line.fill_to(columns.hit[0], base)
            line.put(_hit(view).rjust(columns.hit[1]), on(look.good))
        if columns.phase[1]:
            text, style = phase_text(view, look)
            line.fill_to(columns.phase[0], base).put_text(text, on(style), columns.phase[1])
        if columns.bar[1]:
            line.fill_to(columns.bar[0], base)
            line.put_segments(self._bar(view, now, bars, back if chosen else None), columns.bar[1])
        if columns.ms[1]:
            end = now if view.closed is None else view.closed
            ms = view.e2e_ms if view.e2e_ms is not None else (end - view.received) / 1e6
            line.fill_to(columns.ms[0] - 1, base)
            line.put(look.glyphs.warning if view.incomplete else " ", on(look.warn))
            line.put(figures.clock(ms, columns.ms[1]), on(look.bold) if live else base)
        return line.end(base)

    def _bar(self, view: RequestView, now: int, bars: Bars, back: str | None) -> list[Segment]:
        begin, span, units = self.axis.begin, self.axis.span, bars.units
        end = now if view.closed is None else view.closed
        stretches = [
            Stretch(
                (view.received - begin) * units // span, (end - begin) * units // span, UNATTRIBUTED
            )
        ]
        waits: list[tuple[int, int]] = []
        for segment in view.segments:
            stop = end if segment.end is None else segment.end
            code = int(segment.stage)
            if segment.waiting:
                code |= WAIT
                if view.preemptions and segment.stage in (Stage.PREFILL, Stage.DECODE):
                    waits.append((segment.begin - stop, segment.begin))
            stretches.append(
                Stretch(
                    (segment.begin - begin) * units // span, (stop - begin) * units // span, code
                )
            )
        # Every preemption is followed by a wait, and by far longer ones than the gaps between
        # chunks.
        marks = [
            (self.axis.column(t, bars.width), self.look.glyphs.preempted)
            for _, t in sorted(waits)[: view.preemptions]
        ]
        head = self.axis.column(end, bars.width) if view.closed is None else None
        shade = (0 if view.closed is None else 2) + (view.key[1] & 1)
        should = self.expect(view) if self.ticks else None
        tick = (
            None if should is None else (view.received + int(should * 1e6) - begin) * units // span
        )
        return bars.draw(
            stretches,
            back,
            marks=marks,
            head=head,
            cut=view.received < begin,
            shade=shade,
            expected=tick,
        )

    def _nothing_yet(self, width: int, height: int) -> list[Row]:
        """What stands in place of the bars: what the program is doing, and the stages that will be
        seen."""
        look = self.look
        rows: list[Row] = []
        lines = [
            Line(width).put("  ", look.text).put_text(text, look.bold) for text in self.waiting_text
        ]
        if height >= len(lines) + 16 and width >= 50:
            rows.append(blank(width, look.text))
        rows.extend(line.end(look.text) for line in lines)
        if height >= len(rows) + len(STAGES) + 2 and width >= 50:
            rows.append(blank(width, look.text))
            for stage in STAGES:
                line = Line(width).put("    ", look.text)
                line.put(look.fill(stage.stage) * 2, look.stage(stage.stage)).put(
                    f" {int(stage.stage):2d} ", look.dim
                )
                line.put(stage.label.ljust(12), look.text).put(stage.where.ljust(5), look.dim)
                line.put(f"{stage.begins} {look.glyphs.arrow} {stage.ends}", look.dim)
                rows.append(line.end(look.text))
        return rows[: max(0, height)]

    # --- user

    def on_click(self, event: events.Click) -> None:
        """Select a row, open it on a double click, sort by a column on its name."""
        row = event.y - self.header_rows
        if event.y == 1 and self.header_rows == 2:
            columns = Columns.of(self.size.width)
            for name, sort in SORT_OF_COLUMN.items():
                at, cells = getattr(columns, name)
                if cells and at <= event.x < at + cells:
                    self.listing.sort_by(sort)
                    self.post_message(self.Moved())
            return
        if 0 <= row < len(self.listing.rows):
            self.listing.select(row)
            if event.chain >= 2:
                self.post_message(self.Opened(self.listing.rows[row]))
            else:
                self.post_message(self.Moved())

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Older requests."""
        event.stop()
        self.listing.scroll(-3)
        self.post_message(self.Moved())

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Newer requests."""
        event.stop()
        self.listing.scroll(3)
        if self.listing.offset == 0 and self.listing.newest_last and self.listing.selected is None:
            self.listing.follow()
        self.post_message(self.Moved())


def _hit(view: RequestView) -> str:
    if not view.cached_tokens or not view.prompt_tokens:
        return ""
    return f"{100 * view.cached_tokens // view.prompt_tokens}%"
