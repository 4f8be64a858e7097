"""A viewer for tests: reads one socket and says on stdout, a line each, what it has got so far."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from engine_hooks.protocol.events import Gap, SourceGone
from tracer.transport.sources import LiveSource


async def main() -> None:
    """Read until the source ends."""
    received = missing = 0
    async for delivery in LiveSource(Path(sys.argv[1])):
        gone = ""
        for event in delivery.events:
            if isinstance(event, Gap):
                missing += event.missing
            elif isinstance(event, SourceGone):
                gone = event.reason
            else:
                received += 1
        print(json.dumps({"received": received, "missing": missing, "gone": gone}), flush=True)


asyncio.run(main())
