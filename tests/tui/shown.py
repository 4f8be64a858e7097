"""Shows a timeline on the terminal it is started on: ``python -m tests.tui.shown [--crash]``."""

from __future__ import annotations

import sys

from tests.tui.stage import FixedFeed
from tests.tui.timeline import START, Timeline
from tracer.clock import NS_PER_S
from tracer.tui.app import TracerApp


def main() -> int:
    """Run until the user quits; with ``--crash`` a key raises inside the app."""
    timeline = Timeline(40, rate=9.0, ids="req_{}_中[/red]")
    app = TracerApp(FixedFeed(timeline.events, START + 5 * NS_PER_S))
    if "--crash" in sys.argv:

        def crash() -> None:
            raise RuntimeError("a defect in a widget")

        app.action_help = crash  # type: ignore[method-assign]
    app.run()
    return app.return_code or 0


if __name__ == "__main__":
    raise SystemExit(main())
