"""How often the buffer is drained: often for somebody who looks, seldom while nothing happens."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from engine_hooks.protocol.clock import now
from engine_hooks.protocol.events import Sent
from engine_hooks.publish.buffer import EventBuffer
from engine_hooks.publish.publisher import (
    IDLE_AFTER,
    IDLE_PERIOD,
    PERIOD,
    UNSEEN_PERIOD,
    Publisher,
    drain_period,
)

from .processes import eventually


@pytest.mark.parametrize(("watched", "idle", "period"), [
    (True, 0.0, PERIOD), (True, IDLE_AFTER, PERIOD), (True, IDLE_AFTER + 1e-9, IDLE_PERIOD),
    (False, 0.0, UNSEEN_PERIOD), (False, 60.0, UNSEEN_PERIOD),
])  # fmt: skip
def test_the_period_of_an_engine(watched: bool, idle: float, period: float) -> None:
    assert drain_period(watched=watched, idle=idle) == period


def test_an_engine_at_work_is_drained_more_often_than_an_idle_one(directory: Path) -> None:
    buffer = EventBuffer()
    publisher = Publisher(buffer, role="engine", title="t", directory=directory)
    drains: list[float] = []
    publisher.add_consumer(lambda _seq, _events: drains.append(time.monotonic()))
    publisher.start()

    def quick() -> bool:
        buffer.emit(Sent(now(), 1, 0, 0))
        gaps = [later - earlier for earlier, later in itertools.pairwise(drains)]
        return any(PERIOD <= gap < IDLE_PERIOD for gap in gaps)

    eventually(quick)
    publisher.stop()
