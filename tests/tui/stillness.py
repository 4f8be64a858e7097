"""When an app under test has nothing left to do, told by its event loop.

Textual's pilot looks at the processor's clock for it: that takes at least 20 ms a key, and on a
busy machine, or beside a thread that works, up to a second, after which it goes on whether the app
has come to rest or not. With each pause it also paints the screen in front, even one that never
would by itself.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from textual import app, pilot
from textual._context import active_app

PATIENCE_S = 30.0
"""For what threads reckon: the machine may be busy."""


async def at_rest(*_seconds: float) -> None:
    """Return when the loop has nothing to run, no thread of its works, and what was drawn is on the
    screen: all that follows is started by a timer, another program or the test. (Stands for a
    function that is told how long to wait.)
    """
    loop: Any = asyncio.get_running_loop()
    deadline = time.monotonic() + PATIENCE_S
    quiet = 0
    while quiet < 2:
        assert time.monotonic() < deadline, "the app never comes to rest"
        await asyncio.sleep(0)
        if loop._ready:
            quiet = 0
        elif _working(loop._default_executor):
            quiet = 0
            await asyncio.sleep(0.001)
        else:
            quiet += not _painted()


def _working(executor: ThreadPoolExecutor | None) -> bool:
    """Whether a thread of the loop's pool has something to do."""
    if executor is None:
        return False
    idle: Any = executor._idle_semaphore
    return executor._work_queue.qsize() > 0 or idle._value < len(executor._threads)


def _painted() -> bool:
    """Do what waits for the next turn of the screens, in front or behind, or for a moment without
    another size; whether there was something."""
    running: Any = active_app.get()
    done = running._resize_timer is not None
    if done:
        running._check_resize()
    for screen in running._screen_stack:
        if not screen.is_running or running._batch_count:
            continue
        turns = screen._update_timer
        # without a task they have ended, with the screen
        if turns._task is not None and turns._active.is_set():
            screen._on_timer_update()
            done = True
    return done


async def pause(_pilot: pilot.Pilot[Any], delay: float | None = None) -> None:
    """Wait for so many seconds, and for rest."""
    await asyncio.sleep(delay or 0)
    await at_rest()


def install() -> None:
    """Let pilots wait for this."""
    for module in (app, pilot):
        module.wait_for_idle = at_rest  # type: ignore[attr-defined]
    pilot.Pilot.pause = pause  # type: ignore[method-assign]
