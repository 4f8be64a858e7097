"""Stands in for ssh where there is none: runs the command that ssh would run over there, here,
behind a slow line.

Usage, as TRACER_SSH: ``python stand_in.py SOCKETS DELAY_MS BYTES_A_SECOND [-p PORT] HOST COMMAND``.
SOCKETS is the socket folder of the far host. What the command writes comes late and slowly, as over
a network; the login shell over there is one that prints something first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys

CHUNK = 4096


async def main() -> None:
    """Carry both directions until either ends."""
    sockets, delay, speed, *rest = sys.argv[1:]
    command = rest[-1]
    process = await asyncio.create_subprocess_shell(
        f"echo Welcome to the far host; exec {command}", stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "TRACER_SOCKET_DIR": sockets},
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    loop = asyncio.get_running_loop()
    own = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(own), sys.stdin.buffer)

    async def down(out: asyncio.StreamReader) -> None:
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(16)

        async def deliver() -> None:
            while True:
                at, data = await waiting.get()
                await asyncio.sleep(max(0.0, at - loop.time()))
                os.write(1, data)
                await asyncio.sleep(len(data) / float(speed))

        delivering = asyncio.create_task(deliver())
        while data := await out.read(CHUNK):
            await waiting.put((loop.time() + float(delay) / 1e3, data))
        while not waiting.empty():
            await asyncio.sleep(0.01)
        delivering.cancel()

    async def up(into: asyncio.StreamWriter) -> None:
        while data := await own.read(CHUNK):
            await asyncio.sleep(float(delay) / 1e3)
            into.write(data)
        into.close()

    tasks = {asyncio.create_task(down(process.stdout)), asyncio.create_task(up(process.stdin))}
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        process.terminate()
    os._exit(await process.wait())


# what it has to say about a child that ended is no word of ssh
logging.getLogger("asyncio").setLevel(logging.CRITICAL)
asyncio.run(main())
