"""On the path of an engine's processes: each counts the engine's objects that live in it when
SIGUSR2 asks.

The count goes to the folder that ``TRACER_TEST_CENSUS`` names, as PID.json: class → how many.
"""

import os
import signal

FOLDER = os.environ.get("TRACER_TEST_CENSUS")


def count(_number: int, _frame: object) -> None:
    import collections
    import gc
    import json

    gc.collect()
    found = collections.Counter(
        f"{type(thing).__module__}.{type(thing).__qualname__}" for thing in gc.get_objects()
        if str(getattr(type(thing), "__module__", "")).partition(".")[0] in ("transformers", "vllm")
    )  # fmt: skip
    path = f"{FOLDER}/{os.getpid()}.json"
    with open(path + ".part", "w") as file:  # noqa: PTH123
        json.dump(found, file)
    os.replace(path + ".part", path)  # noqa: PTH105


if FOLDER:
    signal.signal(signal.SIGUSR2, count)
