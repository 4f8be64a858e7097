"""Wrapping an engine's functions without changing what they do.

A `Hook` declares one place: which stages it serves, the dotted path, the parameters it relies on.
`Patches` installs hooks: it checks that the place exists and has those parameters, wraps it, counts
errors of our own code, switches a hook off after `FAULT_LIMIT` of them, and undoes everything.
Nothing here ever raises into the engine or swallows its exceptions: the wrapped function is called
exactly once, outside any guard of ours.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from engine_hooks.protocol.clock import now

FAULT_LIMIT: Final = 5
"""Errors of our own in one hook before it is switched off: enough to see that it is not a single
odd request."""

MARK: Final = "_tracer"
"""Attribute of an engine's object that holds our recorder of it."""

Before = Callable[..., Any]
"""Called as ``before(*args, **kwargs)`` with the engine's arguments; what it returns is handed to
`After`."""
After = Callable[..., None]
"""Called as ``after(token, result, *args, **kwargs)`` when the function returned."""


@dataclass(frozen=True, slots=True)
class Hook:
    """One place in an engine.

    `stages` are the stage numbers that fall away when it cannot be hooked; `path` is
    ``module:Class.method`` or ``module:function``; `needs` the parameter names that our code relies
    on. `failed` is called as ``failed(token, error, *args, **kwargs)`` when the engine's function
    raised; the exception goes on. With `on_recorder` the three are methods of the recorder that
    hangs on the called object, and get the arguments without that object; where none hangs, nothing
    of ours is called.
    """

    path: str
    stages: tuple[int, ...] = ()
    needs: tuple[str, ...] = ()
    before: Before | None = None
    after: After | None = None
    failed: Callable[..., None] | None = None
    is_async: bool = False
    on_recorder: bool = False


recorded: Final = functools.partial(Hook, on_recorder=True)


def stamp(*_: Any, **__: Any) -> int:
    """A `Before` that takes the time (monotonic ns)."""
    return now()


@dataclass(slots=True)
class Patches:
    """The hooks that are installed. `on_fault(path, message, count, disabled)` is called with our
    own errors, from any thread of the engine."""

    on_fault: Callable[[str, str, int, bool], None]
    misses: dict[str, str] = field(default_factory=dict)
    """Path → reason, for hooks that could not be installed."""
    _undo: dict[str, Callable[[], None]] = field(default_factory=dict)
    _faults: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def install(self, *hooks: Hook) -> bool:
        """Install hooks. False, with the reason in `misses`, when a place is not as we know it."""
        installed = [self._install(hook) for hook in hooks]
        return all(installed)

    def _install(self, hook: Hook) -> bool:
        if hook.path in self._undo:
            return True
        place = self.resolve(hook)
        if place is None:
            return False
        owner, name, original = place
        wrapped = self.wrap(hook, original)
        inherited = name not in vars(owner)
        setattr(owner, name, wrapped)

        def undo() -> None:
            if vars(owner).get(name) is not wrapped:
                # somebody wrapped it after us: leave it, ours passes through once `disabled`
                return
            if inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

        self._undo[hook.path] = undo
        return True

    def resolve(self, hook: Hook) -> tuple[Any, str, Callable[..., Any]] | None:
        """(owner, attribute, function) of a hook's place; None, with the reason in `misses`, when
        the place is not what we know."""
        try:
            place = resolve(hook.path)
        except (ImportError, AttributeError) as error:
            self.misses[hook.path] = f"not found in this version: {error}"
            return None
        if lacking := _lacking_parameters(place[2], hook.needs):
            self.misses[hook.path] = f"its parameters changed: {', '.join(lacking)} missing"
            return None
        return place

    def lost(self, hooks: Iterable[Hook]) -> dict[int, tuple[str, str]]:
        """Stage → (path, reason) for the stages of those of `hooks` that could not be installed."""
        return {
            stage: (hook.path, self.misses[hook.path])
            for hook in hooks
            if hook.path in self.misses
            for stage in hook.stages
        }

    def remove(self) -> None:
        """Remove all hooks, last one first."""
        while self._undo:
            self._undo.popitem()[1]()

    def remove_one(self, path: str, reason: str) -> None:
        undo = self._undo.pop(path, None)
        if undo is not None:
            undo()
            self.misses[path] = reason

    def fault(self, path: str, error: BaseException) -> None:
        """Count an error of our own code. At `FAULT_LIMIT` the hook is switched off."""
        with self._lock:
            count = self._faults.get(path, 0) + 1
            self._faults[path] = count
        try:
            self.on_fault(path, f"{type(error).__name__}: {error}", count, count >= FAULT_LIMIT)
        except Exception:  # the last guard: there is nowhere left to report it
            return

    def disabled(self, path: str) -> bool:
        return self._faults.get(path, 0) >= FAULT_LIMIT

    def guarded(self, path: str, ours: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
        """Call code of our own, and count its error."""
        try:
            return None if ours is None else ours(*args, **kwargs)
        except Exception as error:
            self.fault(path, error)

    def wrap(self, hook: Hook, original: Callable[..., Any]) -> Callable[..., Any]:
        if hook.is_async:
            return self._wrap_async(hook, original)
        return (self._wrap_recorded if hook.on_recorder else self._wrap)(hook, original)

    # The next two run many times a step: guarded in place, without a call more.

    def _wrap(self, hook: Hook, original: Callable[..., Any]) -> Callable[..., Any]:
        before, after, failed, path = hook.before, hook.after, hook.failed, hook.path
        faults = self._faults

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if faults and faults.get(path, 0) >= FAULT_LIMIT:
                return original(*args, **kwargs)
            token = None
            if before is not None:
                try:
                    token = before(*args, **kwargs)
                except Exception as error:
                    self.fault(path, error)
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                self.guarded(path, failed, token, error, *args, **kwargs)
                raise
            if after is not None:
                try:
                    after(token, result, *args, **kwargs)
                except Exception as error:
                    self.fault(path, error)
            return result

        return wrapper

    def _wrap_recorded(self, hook: Hook, original: Callable[..., Any]) -> Callable[..., Any]:
        before, after, failed, path = hook.before, hook.after, hook.failed, hook.path
        faults = self._faults

        @functools.wraps(original)
        def wrapper(owner: Any, *args: Any, **kwargs: Any) -> Any:
            recorder = owner.__dict__.get(MARK)
            if recorder is None or (faults and faults.get(path, 0) >= FAULT_LIMIT):
                return original(owner, *args, **kwargs)
            token = None
            if before is not None:
                try:
                    token = before(recorder, *args, **kwargs)
                except Exception as error:
                    self.fault(path, error)
            try:
                result = original(owner, *args, **kwargs)
            except BaseException as error:
                self.guarded(path, failed, recorder, token, error, *args, **kwargs)
                raise
            if after is not None:
                try:
                    after(recorder, token, result, *args, **kwargs)
                except Exception as error:
                    self.fault(path, error)
            return result

        return wrapper

    def _wrap_async(self, hook: Hook, original: Callable[..., Any]) -> Callable[..., Any]:
        path, guarded = hook.path, self.guarded

        @functools.wraps(original)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self.disabled(path):
                return await original(*args, **kwargs)
            token = guarded(path, hook.before, *args, **kwargs)
            try:
                result = await original(*args, **kwargs)
            except BaseException as error:
                guarded(path, hook.failed, token, error, *args, **kwargs)
                raise
            guarded(path, hook.after, token, result, *args, **kwargs)
            return result

        return wrapper


def resolve(path: str) -> tuple[Any, str, Callable[..., Any]]:
    """(owner, attribute, function) of ``module:Class.method``. Raises ImportError or
    AttributeError."""
    module_name, _, dotted = path.partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = dotted.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name, getattr(owner, name)


def _lacking_parameters(function: Callable[..., Any], needs: tuple[str, ...]) -> list[str]:
    """Those of the named parameters that `function` does not take."""
    if not needs:
        return []
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return []
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return []
    return [name for name in needs if name not in parameters]
