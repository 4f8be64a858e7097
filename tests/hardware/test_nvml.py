"""GPUs as the library tells of them; whatever it does not tell is left out. A library stands in:
not run on a GPU."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from tests.hardware.nvml_double import Library, NVMLError
from tracer.monitor.hardware.nvml import Gpu, Nvml

FUNCTIONS = [name for name in vars(Library) if name.startswith("nvmlDeviceGet")]


def test_all_that_there_is() -> None:
    (gpu,) = Nvml(Library).sample([1])
    assert gpu == Gpu(
        0,
        "NVIDIA H200",
        0.93,
        120 * 1024**3,
        150 * 1024**3,
        1_755,
        1_980,
        612.0,
        700.0,
        61,
        ("power cap",),
    )


def test_without_the_library_there_is_nothing_and_a_reason() -> None:
    def missing() -> Any:
        raise ModuleNotFoundError("No module named 'pynvml'", name="pynvml")

    nvml = Nvml(missing)
    assert nvml.sample([1]) == () and nvml.reason == "nvidia-ml-py is not installed"
    nvml.close()


def test_the_real_library_without_a_driver_is_no_error() -> None:
    nvml = Nvml()
    assert isinstance(nvml.sample([1]), tuple)
    nvml.close()


def test_a_driver_that_does_not_start_is_a_reason() -> None:
    nvml = Nvml(lambda: Library(refuses=("nvmlInit",)))
    assert nvml.sample([1]) == () and "nvmlInit: Not Supported" in nvml.reason


@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_figure_may_be_refused(function: str) -> None:
    """As on a share of a GPU, or when it has fallen off the bus: the others are still told."""
    nvml = Nvml(lambda: Library(refuses=(function,)))
    found = nvml.sample([1])
    if function in ("nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"):
        assert found == () and "Not Supported" in nvml.reason
        return
    (gpu,) = found
    told = [getattr(gpu, field.name) for field in fields(Gpu)]
    assert sum(value not in (None, "", ()) for value in told) >= 8


def test_all_of_it_may_be_refused_or_nonsense() -> None:
    figures = tuple(name for name in FUNCTIONS if "Count" not in name and "Handle" not in name)
    (gpu,) = Nvml(lambda: Library(refuses=figures)).sample([1])
    assert gpu == Gpu(0)

    class Nonsense(Library):
        def __getattribute__(self, name: str) -> Any:
            if name.startswith("nvmlDeviceGet") and name not in (
                "nvmlDeviceGetCount",
                "nvmlDeviceGetHandleByIndex",
            ):
                return lambda *_: "nonsense"
            return super().__getattribute__(name)

    (gpu,) = Nvml(Nonsense).sample([1])
    assert gpu == Gpu(0, "nonsense")


def test_the_gpus_that_the_engine_computes_on() -> None:
    nvml = Nvml(lambda: Library(gpus=4, pids={11: 1, 12: 3, 99: 0}))
    assert [gpu.index for gpu in nvml.sample([11, 12])] == [1, 3]
    assert [gpu.index for gpu in nvml.sample([5], visible="2")] == [2]
    assert [gpu.index for gpu in nvml.sample([5], visible="GPU-333")] == [3]
    assert [gpu.index for gpu in nvml.sample([5])] == [0, 1, 2, 3]


def test_a_gpu_that_is_lost_later_leaves_nothing_behind() -> None:
    library = Library()
    nvml = Nvml(lambda: library)
    assert len(nvml.sample([1])) == 1
    library.refuses = ("nvmlDeviceGetHandleByIndex",)
    assert nvml.sample([1]) == ()
    nvml.close()
    assert library.closed and nvml.sample([1]) == ()
    assert NVMLError("x").args == ("x",)
