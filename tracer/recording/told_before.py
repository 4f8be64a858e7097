"""What is true of each source at an instant, for a file that starts there."""

from __future__ import annotations

from engine_hooks.protocol.attach_state import AttachState
from engine_hooks.protocol.events import Header, SourceGone
from engine_hooks.protocol.stream_decoder import Delivery


class ToldBefore:
    """Follows deliveries and keeps what a viewer that attached now would be told."""

    def __init__(self) -> None:
        self._sources: dict[str, tuple[Header | None, AttachState]] = {}

    def observe(self, delivery: Delivery, due: int) -> None:
        """Take note of a delivery that was known by the instant `due` (ns)."""
        header, attach_state = self._sources.get(delivery.source) or (None, AttachState())
        self._sources[delivery.source] = delivery.header or header, attach_state
        attach_state.observe(delivery.events, due)
        if delivery.events and type(delivery.events[-1]) is SourceGone:
            del self._sources[delivery.source]

    def deliveries(self, until: int) -> list[Delivery]:
        """Return the headers of the sources that are there, and what is still true, without events
        after the instant `until` (ns)."""
        return [
            Delivery(name, header, [event for event in attach_state.snapshot() if event.t <= until])
            for name, (header, attach_state) in self._sources.items()
        ]
