"""Wrapping: the engine's function runs once, its exceptions pass, ours never do, and everything can
be undone."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest

from engine_hooks.base.patching import FAULT_LIMIT, Hook, Patches


@pytest.fixture
def engine() -> Iterator[types.ModuleType]:
    module = types.ModuleType("a_small_engine")

    class Base:
        def inherited(self, x: int) -> int:
            return x

    class Engine(Base):
        calls = 0

        def step(self, tokens: int) -> int:
            Engine.calls += 1
            if tokens < 0:
                raise ValueError("negative")
            return tokens + 1

        async def answer(self, tokens: int) -> int:
            return tokens * 2

    module.Engine = Engine  # type: ignore[attr-defined]
    sys.modules["a_small_engine"] = module
    yield module
    del sys.modules["a_small_engine"]


@pytest.fixture
def faults() -> list[tuple[str, str, int, bool]]:
    return []


@pytest.fixture
def patches(faults: list[tuple[str, str, int, bool]]) -> Patches:
    return Patches(lambda *fault: faults.append(fault))


def test_a_hook_sees_arguments_and_result_and_is_undone(
    engine: types.ModuleType, patches: Patches
) -> None:
    seen: list[object] = []
    original = engine.Engine.step
    assert patches.install(
        Hook(
            "a_small_engine:Engine.step",
            needs=("tokens",),
            before=lambda _self, tokens: tokens * 10,
            after=lambda token, result, _self, tokens: seen.append((token, result, tokens)),
        )
    )
    assert engine.Engine().step(3) == 4
    assert seen == [(30, 4, 3)]
    patches.remove()
    assert engine.Engine.step is original


def test_a_hook_that_is_in_is_not_put_in_again(engine: types.ModuleType, patches: Patches) -> None:
    """A second engine in the same process asks for it."""
    seen: list[int] = []
    original = engine.Engine.step
    hook = Hook("a_small_engine:Engine.step", before=lambda _self, tokens: seen.append(tokens))
    assert patches.install(hook) and patches.install(hook)
    engine.Engine().step(3)
    assert seen == [3]
    patches.remove()
    assert engine.Engine.step is original


def test_an_inherited_method_is_given_back_to_its_base(
    engine: types.ModuleType, patches: Patches
) -> None:
    assert patches.install(Hook("a_small_engine:Engine.inherited"))
    assert "inherited" in vars(engine.Engine)
    patches.remove()
    assert "inherited" not in vars(engine.Engine)
    assert engine.Engine().inherited(1) == 1


def test_the_engines_exception_passes_and_is_told(
    engine: types.ModuleType, patches: Patches
) -> None:
    told: list[str] = []
    patches.install(
        Hook(
            "a_small_engine:Engine.step", failed=lambda _token, error, *_a: told.append(str(error))
        )
    )
    with pytest.raises(ValueError, match="negative"):
        engine.Engine().step(-1)
    assert told == ["negative"]
    assert engine.Engine.calls == 1


def test_our_own_error_never_reaches_the_engine_and_switches_the_hook_off(
    engine: types.ModuleType, patches: Patches, faults: list[tuple[str, str, int, bool]]
) -> None:
    runs = 0

    def broken(*_args: object) -> None:
        nonlocal runs
        runs += 1
        raise RuntimeError("ours")

    patches.install(Hook("a_small_engine:Engine.step", before=broken))
    for _ in range(FAULT_LIMIT + 3):
        assert engine.Engine().step(1) == 2
    assert engine.Engine.calls == FAULT_LIMIT + 3
    assert runs == FAULT_LIMIT
    assert [disabled for *_rest, disabled in faults] == [False] * (FAULT_LIMIT - 1) + [True]
    assert patches.disabled("a_small_engine:Engine.step")


def test_a_place_that_is_gone_or_changed_is_a_reason_not_an_error(
    engine: types.ModuleType, patches: Patches
) -> None:
    assert not patches.install(Hook("a_small_engine:Engine.nothing"))
    assert not patches.install(Hook("no_such_module:f"))
    assert not patches.install(Hook("a_small_engine:Engine.step", needs=("tokens", "budget")))
    assert patches.misses["a_small_engine:Engine.step"] == "its parameters changed: budget missing"
    assert "not found" in patches.misses["a_small_engine:Engine.nothing"]
    assert "not found" in patches.misses["no_such_module:f"]


async def test_a_coroutine_is_awaited_once(engine: types.ModuleType, patches: Patches) -> None:
    seen: list[int] = []
    patches.install(
        Hook(
            "a_small_engine:Engine.answer",
            after=lambda _t, result, *_a: seen.append(result),
            is_async=True,
        )
    )
    assert await engine.Engine().answer(4) == 8
    assert seen == [8]


def test_a_wrapper_of_somebody_else_is_left_in_place(
    engine: types.ModuleType, patches: Patches
) -> None:
    patches.install(Hook("a_small_engine:Engine.step"))
    ours = engine.Engine.step

    def theirs(self: object, tokens: int) -> int:
        return int(ours(self, tokens))

    engine.Engine.step = theirs
    patches.remove()
    assert engine.Engine.step is theirs
    assert engine.Engine().step(1) == 2
