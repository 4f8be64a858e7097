"""Devices by name, and this machine measured."""

from __future__ import annotations

import time

import pytest

from tracer.analysis.errors import AnalysisError
from tracer.analysis.model import devices
from tracer.analysis.model.devices import DEVICES, device, device_told, this_cpu


def test_every_preset_has_a_source_and_sensible_figures() -> None:
    for name, found in DEVICES.items():
        assert found.name == name
        assert found.source
        # More than ten and less than a thousand FLOPs for each byte: anything else is a slip of a
        # unit.
        assert 50 < found.bf16 / found.bandwidth < 1000
        assert 20 * 2**30 < found.memory < 300 * 2**30
        assert found.fp8 in (0.0, pytest.approx(2 * found.bf16, rel=0.02))


@pytest.mark.parametrize("given", ["H100", "h100_sxm", "h100-sxm5", " H100 SXM "])
def test_a_device_is_known_however_it_is_spelt(given: str) -> None:
    assert device(given) is DEVICES["h100-sxm"]


def test_an_unknown_device_is_answered_with_those_that_are_known() -> None:
    with pytest.raises(AnalysisError, match=r"no device called 'tpu'.*h200.*cpu"):
        device("tpu")


def test_a_narrow_dtype_runs_at_the_next_wider_rate_where_there_is_none() -> None:
    assert DEVICES["a100-80"].peak("fp8") == DEVICES["a100-80"].bf16
    assert DEVICES["h100-sxm"].peak("fp8") == 1979e12
    assert DEVICES["h100-sxm"].peak("int4") == DEVICES["h100-sxm"].bf16


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_device_is_known_by_what_its_driver_calls_it(told: str, name: str) -> None:
    assert device_told(told) is DEVICES[name]


def test_a_device_that_is_only_numbered_is_not_guessed() -> None:
    assert device_told("cuda:0") is None


def test_this_machine_is_measured_once_and_quickly() -> None:
    devices._measured.cache_clear()
    begin = time.process_time()
    found = device("cpu")
    # CPU time: on a busy machine the wall clock says nothing
    assert time.process_time() - begin < 2.5
    assert this_cpu().bandwidth == found.bandwidth
    assert this_cpu(4).bf16 == 4 * found.bf16
    assert 1e9 < found.bf16 < 1e13
    assert 5e8 < found.bandwidth < 1e12
    assert found.memory > 2**28
    assert "×" in found.title
