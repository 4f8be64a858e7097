"""The list of requests: one row each, with its bar on a time axis that all of them share and its
clock at the right.

Columns depend on the width only, never on values, so that nothing jumps. Rows of finished requests
are drawn once a page of the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.message import Message

from engine_hooks.protocol.stages import STAGES, Group, Stage
from tracer.format import figures
from tracer.state.view import Phase, RequestView, Snapshot
from tracer.tui.listing import Listing
from tracer.tui.naming import phase_text, short_id
from tracer.tui.screens.live.rows import add_ticks, grid_of, words
from tracer.tui.toolkit.axis import SHORTEST, PageAxis, Tick
from tracer.tui.toolkit.bar import UNATTRIBUTED, WAIT, Bars, Stretch
from tracer.tui.toolkit.canvas import Line, Row, blank
from tracer.tui.toolkit.panel import Panel
from tracer.tui.toolkit.theme import Look

INTERLACED_FROM = (16, 40)
"""With more live requests in sight than the first, each row moves in every other frame; with more
than the second, in every third: nobody sees it, and the cost of a frame does not rise with them."""

NAMES = ("id", "prompt", "out", "hit", "phase", "ms")
CELLS = (
    (118, (16, 7, 6, 5, 13, 10)),
    (90, (11, 6, 6, 5, 12, 9)),
    (64, (10, 6, 5, 0, 11, 8)),
    (44, (8, 0, 5, 0, 0, 8)),
    (26, (6, 0, 0, 0, 0, 8)),
    (9, (8, 0, 0, 0, 0, 0)),
)
"""Cells of the columns in lists of at least so many cells; 0: not shown."""
SORTED_BY = {"id": "received", "prompt": "prompt", "out": "output", "phase": "phase", "ms": "e2e"}
"""The order that a click on a column's name sorts by."""
SHORT_NAMES = ("recv", "tmpl", "tok", "adm", "kv", "emb", "prefill", "head", "smp", "strm",
               "decode", "end")  # fmt: skip
"""The stages, where their labels have no room."""


@lru_cache(8)
def columns_of(width: int) -> dict[str, tuple[int, int]]:
    """Return the first cell and the cells of each column of a list, and of the bar."""
    narrow = (max(0, width - 1), 0, 0, 0, 0, 0)
    sizes = next((cells for least, cells in CELLS if width >= least), narrow)
    columns: dict[str, tuple[int, int]] = {}
    at = 1  # the selection marker
    for name, cells in zip(NAMES[:-1], sizes, strict=False):
        if not cells:
            continue
        at += name == "out" and "prompt" in columns  # the arrow between prompt and output
        columns[name] = (at, cells)
        at += cells + 1
    ms = sizes[-1]
    columns["bar"] = (at, max(0, width - (ms + 2 if ms else 0) - at))
    if ms:
        columns["ms"] = (width - ms - 1, ms)
    return columns


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
        self._drawn: dict[tuple[str, int], tuple[RequestView, tuple[object, ...], Row]] = {}
        """By request: the view that was drawn, what else its row depends on, and the row."""

    @property
    def header_rows(self) -> int:
        return 2 if self.size.height >= 8 else 1

    @property
    def legend_rows(self) -> int:
        width, height = self.size
        return 1 if height >= 18 and width >= 60 else 0

    @property
    def visible_rows(self) -> int:
        return max(1, self.size.height - self.header_rows - self.legend_rows)

    def show(self, snapshot: Snapshot, waiting_text: tuple[str, ...], frame: int | None) -> None:
        """Draw a snapshot whose requests are those that the listing asked for. With the number of
        the `frame`, of many live requests only those move whose turn it is."""
        self.snapshot = snapshot
        rows = self.listing.rows
        live = sum(view.closed is None for view in rows)
        self.turns = 1 + sum(live > enough for enough in INTERLACED_FROM)
        self._turn = None if frame is None or self.turns == 1 else frame % self.turns
        self.waiting_text = waiting_text
        if rows and self.size:
            latest = max(snapshot.now if view.closed is None else view.closed for view in rows)
            begins = sorted(view.received for view in rows)
            # Old stragglers must not squeeze everyone else: their bars begin before the page, with
            # a mark.
            shortest = SHORTEST if len(rows) > 30 else SHORTEST // 2
            self.axis.fit(begins[len(begins) // 8], latest, shortest)
        self.repaint()

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
            text += " newest first" if listing.by_arrival else " reversed"
        return text

    def note(self) -> list[Segment]:
        listing, look = self.listing, self.look
        older = listing.total - listing.offset - len(listing.rows)
        above, below = (older, listing.offset) if listing.newest_last else (listing.offset, older)
        up = f"{look.glyphs.up} {figures.short_count(above)}" if above > 0 else ""
        down = f"{look.glyphs.down} {figures.short_count(below)}" if below > 0 else ""
        gap = "  " if up and down else ""
        parts = [Segment(up, look.dim), Segment(gap + down, look.warn)]
        return [part for part in parts if part.text]

    def body(self, width: int, height: int) -> list[Row]:
        look, snapshot, requests = self.look, self.snapshot, self.listing.rows
        bar_at, bar_cells = columns_of(width)["bar"]
        ticks = self.axis.ticks(bar_cells, snapshot.began) if snapshot and requests else []
        rows: list[Row] = []
        if self.header_rows > 1:
            rows.append(self._column_names(width, ticks))
        legend_rows = self.legend_rows
        room = max(0, height - len(rows) - legend_rows)
        if not requests or snapshot is None:
            rows += self._nothing_yet(width, room)
            rest: Row = blank(width, look.text)
        else:
            grid = grid_of(look, bar_cells, ticks)
            rows += self._requests(requests[:room], snapshot.now, width, grid)
            rest = Line(width).fill_to(bar_at, look.text).add(grid, look.grid).end(look.text)
        rows += [rest] * (height - legend_rows - len(rows))
        if legend_rows:
            rows.append(legend(look, width, expected=self.ticks))
        return rows

    def _requests(
        self, requests: Sequence[RequestView], now: int, width: int, grid: str
    ) -> list[Row]:
        """Draw a row each; those that would look as they did are not drawn again."""
        bars = Bars(self.look, len(grid), grid)
        context = (width, self.axis.version, grid, self.look, self.ticks)
        before, self._drawn = self._drawn, {}
        for view in requests:
            chosen = view.key == self.listing.selected
            stamp = (*context, chosen, chosen and self.has_focus)
            found = before.get(view.key)
            if found is None or found[1] != stamp or not self._still(found[0], view):
                found = (view, stamp, self._row(view, now, width, bars, chosen))
            self._drawn[view.key] = found
        return [row for _, _, row in self._drawn.values()]

    def _still(self, drawn: RequestView, view: RequestView) -> bool:
        """Tell whether what was drawn of a request will do for another frame."""
        if view.closed is not None:
            return drawn is view
        its_turn = self._turn is None or view.key[1] % self.turns == self._turn
        return not its_turn and drawn.phase is view.phase

    def _column_names(self, width: int, ticks: list[Tick]) -> Row:
        look, listing = self.look, self.listing
        columns = columns_of(width)
        arrow = look.glyphs.up if listing.flipped != listing.by_arrival else look.glyphs.down
        line = Line(width)
        for name, (at, cells) in columns.items():
            line.fill_to(at, look.dim)
            if name == "bar":
                add_ticks(line, look, at, cells, ticks)
                continue
            sorted_here = SORTED_BY.get(name) == listing.sort
            text = (name + arrow if sorted_here else name)[:cells]
            text = text.ljust(cells) if name in ("id", "phase") else text.rjust(cells)
            line.add(text, look.bold if sorted_here else look.dim)
        return line.end(look.dim)

    def _row(self, view: RequestView, now: int, width: int, bars: Bars, chosen: bool) -> Row:
        look = self.look
        back = look.palette.selected if chosen else None
        live = view.closed is None and view.phase not in (Phase.DONE, Phase.LOST)

        def on(style: Style) -> Style:
            return style if back is None else look.on(style, back, reverse=True)

        base = on(look.text if live else look.dim)
        columns = columns_of(width)
        line = Line(width)
        line.add(look.glyphs.select if chosen else " ", on(look.accent) if chosen else base)
        for name, (at, cells) in columns.items():
            line.fill_to(at - 1, base)
            match name:
                case "id":
                    text = short_id(view.id, cells, look.glyphs.ellipsis)
                    line.add_segments([Segment(text, base)], cells)
                case "prompt":
                    line.add(" " + figures.count(view.prompt_tokens).rjust(cells)[-cells:], base)
                case "out":
                    line.add(look.glyphs.arrow if "prompt" in columns else " ", on(look.dim))
                    line.add(figures.count(view.output_tokens).rjust(cells)[-cells:], base)
                case "hit":
                    line.add(" " + _hit(view).rjust(cells), on(look.good))
                case "phase":
                    text, style = phase_text(view, look)
                    line.add(" ", base).add_text(text, on(style), cells)
                case "bar":
                    line.fill_to(at, base).add_segments(self._bar(view, now, bars, back), cells)
                case "ms":
                    end = now if view.closed is None else view.closed
                    ms = view.e2e_ms if view.e2e_ms is not None else (end - view.received) / 1e6
                    line.add(look.glyphs.warning if view.incomplete else " ", on(look.warn))
                    line.add(figures.clock(ms, cells), on(look.bold) if live else base)
        return line.end(base)

    def _bar(self, view: RequestView, now: int, bars: Bars, back: str | None) -> list[Segment]:
        begin, span, units = self.axis.begin, self.axis.span, bars.units

        def place(t: int) -> int:
            return (t - begin) * units // span

        end = now if view.closed is None else view.closed
        stretches = [Stretch(place(view.received), place(end), UNATTRIBUTED)]
        waits: list[tuple[int, int]] = []
        for segment in view.segments:
            stop = end if segment.end is None else segment.end
            code = int(segment.stage)
            if segment.waiting:
                code |= WAIT
                if view.preemptions and segment.stage in (Stage.PREFILL, Stage.DECODE):
                    waits.append((segment.begin - stop, segment.begin))
            stretches.append(Stretch(place(segment.begin), place(stop), code))
        # Every preemption is followed by a wait, and by far longer ones than the gaps between
        # chunks.
        marks = [
            (self.axis.column(t, bars.width), self.look.glyphs.preempted)
            for _, t in sorted(waits)[: view.preemptions]
        ]
        should = self.expect(view) if self.ticks else None
        return bars.draw(
            stretches,
            back,
            marks=marks,
            head=self.axis.column(end, bars.width) if view.closed is None else None,
            cut=view.received < begin,
            shade=(0 if view.closed is None else 2) + (view.key[1] & 1),
            expected=None if should is None else place(view.received + int(should * 1e6)),
        )

    def _nothing_yet(self, width: int, height: int) -> list[Row]:
        """Draw what stands in place of the bars: the state of the program, and the stages to
        come."""
        look = self.look
        rows: list[Row] = []
        if height >= len(self.waiting_text) + 16 and width >= 50:
            rows.append(blank(width, look.text))
        rows += [words(look, width, f"  {text}", look.bold) for text in self.waiting_text]
        if height >= len(rows) + len(STAGES) + 2 and width >= 50:
            rows.append(blank(width, look.text))
            for info in STAGES:
                line = Line(width).add("    ", look.text)
                line.add(look.fill(info.stage) * 2, look.stage(info.stage))
                line.add(f" {int(info.stage):2d} ", look.dim)
                line.add(info.label.ljust(12), look.text).add(info.where.ljust(5), look.dim)
                line.add(f"{info.begins} {look.glyphs.arrow} {info.ends}", look.dim)
                rows.append(line.end(look.text))
        return rows[: max(0, height)]

    def on_click(self, event: events.Click) -> None:
        """Select a row, open it on a double click, sort by a column on its name."""
        row = event.y - self.header_rows
        if event.y == 1 and self.header_rows == 2:
            for name, (at, cells) in columns_of(self.size.width).items():
                if name in SORTED_BY and at <= event.x < at + cells:
                    self.listing.sort_by(SORTED_BY[name])
                    self.post_message(self.Moved())
        elif 0 <= row < len(self.listing.rows):
            self.listing.select(row)
            opened = event.chain >= 2
            self.post_message(self.Opened(self.listing.rows[row]) if opened else self.Moved())

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.listing.scroll(-3)
        self.post_message(self.Moved())

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.listing.scroll(3)
        if self.listing.offset == 0 and self.listing.newest_last and self.listing.selected is None:
            self.listing.follow()
        self.post_message(self.Moved())


def _hit(view: RequestView) -> str:
    if not view.cached_tokens or not view.prompt_tokens:
        return ""
    return f"{100 * view.cached_tokens // view.prompt_tokens} %"


@lru_cache(8)
def legend(look: Look, width: int, *, expected: bool) -> Row:
    """Draw the stages with their colours, in as many words as fit; by group where glyphs tell them
    apart. `expected`: whether bars carry the tick at which they should have ended."""
    glyphs = look.glyphs
    line = Line(width).add(" ", look.text)
    if look.fine:
        wide = _add_stages(line, look, expected)
    else:
        wide = True
        for group in Group:
            first = next(stage.stage for stage in STAGES if stage.group is group)
            style = look.stage(Stage.PREFILL if group is Group.PREFILL else first)
            line.add(glyphs.fill[group], style).add(f" {group.value}  ", look.dim)
    if wide:
        style = look.stage(Stage.ADMISSION) if look.fine else look.text
        line.add(glyphs.wait, style).add(" waiting  ", look.dim)
        line.add(glyphs.preempted, look.bad).add(" preempted  ", look.dim)
    if expected and line.room >= 6:
        word = " expected" if line.room >= 10 else " exp."
        line.add(glyphs.expected, look.bold).add(word, look.dim)
    return line.end(look.text)


def _add_stages(line: Line, look: Look, expected: bool) -> bool:
    """Put each stage with its name; True where there was room for more than the short names."""
    rest = len("░ waiting  × preempted") + len("  | expected") * expected
    names: Sequence[str] = [stage.label for stage in STAGES]
    if sum(len(name) + 4 for name in names) + rest > line.width:
        names = SHORT_NAMES
    wide = sum(len(name) + 3 for name in names) + rest < line.width
    for stage, name in zip(STAGES, names, strict=True):
        line.add("█" if wide else "▌", look.stage(stage.stage))
        line.add(f"{name}  " if wide else f"{name} ", look.dim)
    return wide
