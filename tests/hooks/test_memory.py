"""The hooks keep nothing of an engine alive: what dies without them dies with them, at the same
moment."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.hooks.census import family, left_behind, settled
from tests.hooks.memory_child import resident
from tests.hooks.server import serving

pytestmark = pytest.mark.slow

ROUNDS = 50
SETTLED = 10
"""Rounds after which allocators have what they keep for later."""
GROWTH = 16 << 20
"""Bytes that an allocator may take more. The cache of one round is as large."""


def rounds(*, hooks: bool) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.hooks.memory_child", str(ROUNDS), str(int(hooks))],
        capture_output=True, text=True, timeout=280, check=False,
        # else each round's thread may take an arena of its own
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_rounds_of_generate_batch_leave_nothing_behind() -> None:
    without, hooked = rounds(hooks=False), rounds(hooks=True)
    assert hooked["events"] > 4 * ROUNDS, "the hooks saw nothing"
    assert hooked["alive"] == without["alive"]
    assert (hooked["last"], hooked["collected"]) == (without["last"], without["collected"])
    assert hooked["memory"][-1] - hooked["memory"][SETTLED] < GROWTH


async def growth(url: str, model: str, pid: int) -> int:
    """By how many bytes a server's processes grew over the rounds of requests, once they had
    settled."""
    client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)

    async def ask(number: int, streamed: bool) -> None:
        messages: Any = [{"role": "user", "content": f"What comes after {number}?"}]
        answer = await client.chat.completions.create(
            model=model, messages=messages, max_tokens=3, stream=streamed
        )
        if streamed:
            async for _ in answer:  # type: ignore[union-attr]
                pass

    sizes = []
    for number in range(ROUNDS):
        await asyncio.gather(ask(number, True), ask(number + 1000, False))
        sizes.append(sum(resident(process) for process in family(pid)))
    return sizes[-1] - sizes[SETTLED]


async def test_rounds_of_requests_leave_nothing_behind_in_a_server(
    model_dir: Path, tmp_path: Path
) -> None:
    """No more objects of the engine live after them with the hooks than without, and memory is
    flat."""
    found = {}
    for traced in (True, False):
        folder = tmp_path / str(traced)
        folder.mkdir()
        with serving(model_dir, folder, traced=traced) as server:
            grown = await growth(server.url, server.model, server.process.pid)
            found[traced] = settled(server.process.pid, folder)
        if traced:
            assert grown < GROWTH
    assert sum(found[True].values()) > 100
    assert not left_behind(found[True], found[False], ROUNDS)
