"""Who may import whom, seen in `sys.modules`: the contracts in pyproject.toml say the same of the
source."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

ENGINES = ("torch", "transformers", "vllm")


def loaded_by(statement: str) -> set[str]:
    """Names of all modules that are there after `statement` in a fresh interpreter."""
    code = f"import sys\n{statement}\nprint(chr(10).join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


MODULES = (
    "tracer",
    "tracer.cli.main",
    "tracer.state.trace_state",
    "tracer.transport.bus",
    "engine_hooks.publish.publisher",
    "tracer.export.text",
    "tracer.export.jsondoc",
    "tracer.cli.export",
    "tracer.export.page_file",
    "tracer.export.metrics",
    "tracer.monitor.monitor",
    "tracer.monitor.hardware.gauge",
    "engine_hooks",
    "engine_hooks.transformers.continuous_batching",
    "engine_hooks.inject",
)


@pytest.fixture(scope="module")
def loaded_after() -> dict[str, set[str]]:
    """Which of the engines and Textual are there after each module was loaded without any other of
    ours; into one interpreter, in this order."""
    code = f"""
import importlib, json, sys
for name in {MODULES!r}:
    importlib.import_module(name)
    print(json.dumps([name, sorted({{*{ENGINES!r}, "textual"}} & {{*sys.modules}})]))
    for ours in [m for m in sys.modules if m.partition(".")[0] in ("tracer", "engine_hooks")]:
        del sys.modules[ours]
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return {name: set(found) for name, found in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("module", MODULES)
def test_neither_an_engine_nor_the_screen_is_loaded(
    module: str, loaded_after: dict[str, set[str]]
) -> None:
    assert loaded_after[module] == set()


def test_the_screen_loads_no_engine() -> None:
    assert not loaded_by("import tracer.tui.app") & set(ENGINES)


def test_the_hooks_bring_only_msgspec_into_an_engine() -> None:
    before = loaded_by("pass")
    extra = {
        name.partition(".")[0]
        for name in loaded_by("import engine_hooks.transformers.serve") - before
    }
    third_party = extra - set(sys.stdlib_module_names) - {"tracer", "engine_hooks"}
    # the latter is taken by msgspec where it is there
    assert third_party <= {"msgspec", "typing_extensions"}
