"""The parts that a process of vLLM plays: API server, engine core, worker, or all of them."""

from __future__ import annotations

import multiprocessing
import os

from engine_hooks.base.emitter import Emitter


class Roles:
    """The parts that this process was seen to play."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self._roles: set[str] = set()
        self._pid = os.getpid()

    def play(self, role: str, number: int = -1) -> None:
        """Open the socket, or add a part to those that this process plays."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._roles.clear()
        self._roles.add(role)
        if len(self._roles - {"worker"}) > 1:
            role, number = "engine", -1
        elif role == "worker" and "core" in self._roles:
            return
        if number < 0:
            number = number_of(multiprocessing.current_process().name)
        self.emitter.start(role, f"vLLM {role}" + (f" {number}" if number >= 0 else ""))


def named(kind: str) -> bool:
    """True when this process's name starts with `kind`."""
    return multiprocessing.current_process().name.startswith(kind)


def number_of(process: str) -> int:
    """Return the number in the name of an API server or data-parallel core, -1 without one."""
    if not process.startswith(("ApiServer_", "EngineCore_DP")):
        return -1
    tail = process.rpartition("_")[2].removeprefix("DP")
    return int(tail) if tail.isdecimal() else -1
