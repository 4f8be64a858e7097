"""Shows a timeline on the terminal it is started on: ``python -m tests.tui.shown [--crash |
--noise]``."""

from __future__ import annotations

import logging
import sys
import warnings

from engine_hooks.protocol.clock import NS_PER_S
from tests.tui.stage import FixedFeed
from tests.tui.timeline import START, Timeline
from tracer.tui.app import TracerApp


def main() -> int:
    """Run until the user quits; with ``--crash`` a key raises inside the app, with ``--noise`` each
    frame warns, logs and prints."""
    timeline = Timeline(40, rate=9.0, ids="req_{}_中[/red]")
    app = TracerApp(FixedFeed(timeline.events, START + 5 * NS_PER_S))
    if "--crash" in sys.argv:

        def crash() -> None:
            raise RuntimeError("a defect in a widget")

        app.action_help = crash  # type: ignore[method-assign]
    if "--noise" in sys.argv:
        tick, handler = app.tick, logging.StreamHandler()
        logging.getLogger().addHandler(handler)
        warnings.simplefilter("always")

        def noisy() -> None:
            handler.stream = sys.stderr
            warnings.warn("SPILL warned", stacklevel=1)
            logging.getLogger("library").error("SPILL logged")
            print("SPILL printed")
            print("SPILL printed", file=sys.stderr)
            tick()

        app.tick = noisy  # type: ignore[method-assign]
    app.run()
    return app.return_code or 0


if __name__ == "__main__":
    raise SystemExit(main())
