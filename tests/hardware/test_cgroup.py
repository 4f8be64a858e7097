"""How a control group holds a process back, on trees as kernels show them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine_hooks.protocol.clock import NS_PER_S
from tracer.monitor.hardware.cgroup import CgroupWatch


class Tree:
    """A process in a group."""

    def __init__(self, root: Path, line: str) -> None:
        self.proc, self.mount = root / "proc", root / "cgroup"
        (self.proc / "7").mkdir(parents=True)
        (self.proc / "7" / "cgroup").write_text(line + "\n")
        self.mount.mkdir()

    def write(self, folder: str, name: str, text: str) -> None:
        path = self.mount / folder
        path.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)

    def watch(self) -> CgroupWatch:
        return CgroupWatch(7, proc=self.proc, mount=self.mount)


def stat(throttled_us: int) -> str:
    return (
        f"usage_usec 1\nuser_usec 1\nnr_periods 10\nnr_throttled 2\nthrottled_usec {throttled_us}\n"
    )


def test_the_share_of_the_time_in_which_it_was_throttled(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/a/b")
    tree.write("a/b", "cpu.stat", stat(0))
    tree.write("a/b", "cpu.max", "150000 100000\n")
    tree.write("a", "cpu.max", "max 100000\n")
    watch = tree.watch()
    first = watch.sample(10 * NS_PER_S)
    assert first is not None and (first.cores, first.share) == (1.5, None)
    tree.write("a/b", "cpu.stat", stat(500_000))
    second = watch.sample(12 * NS_PER_S)
    assert (
        second is not None
        and second.share == pytest.approx(0.25)
        and second.total_s == pytest.approx(0.5)
    )


def test_a_group_around_it_counts_too(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/pod/container")
    tree.write("pod/container", "cpu.stat", stat(0))
    tree.write("pod", "cpu.stat", stat(1_000_000))
    tree.write("pod", "cpu.max", "50000 100000")
    found = tree.watch().sample(0)
    assert found is not None and found.cores == 0.5 and found.total_s == pytest.approx(1.0)


def test_inside_a_container_the_group_is_what_is_mounted(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/docker/0123abcd")
    tree.write(".", "cpu.stat", stat(2_000_000))
    tree.write(".", "cpu.max", "200000 100000")
    found = tree.watch().sample(0)
    assert found is not None and found.cores == 2.0 and found.total_s == pytest.approx(2.0)


def test_the_older_version_of_groups(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "5:memory:/x\n4:cpu,cpuacct:/x")
    tree.write(
        "cpu,cpuacct/x", "cpu.stat", "nr_periods 4\nnr_throttled 1\nthrottled_time 3000000000\n"
    )
    tree.write("cpu,cpuacct/x", "cpu.cfs_quota_us", "400000\n")
    tree.write("cpu,cpuacct/x", "cpu.cfs_period_us", "100000\n")
    found = tree.watch().sample(0)
    assert found is not None and found.cores == 4.0 and found.total_s == pytest.approx(3.0)
    tree.write("cpu,cpuacct/x", "cpu.cfs_quota_us", "-1\n")
    found = tree.watch().sample(0)
    assert found is not None and found.cores is None


def test_no_limit_no_groups_and_no_process_are_no_error(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/")
    assert tree.watch().sample(0) is None
    assert CgroupWatch(8, proc=tree.proc, mount=tree.mount).sample(0) is None
    tree.write(".", "cpu.stat", "\x00garbage\nthrottled_usec x\nthrottled_usec\n")
    tree.write(".", "cpu.max", "max")
    assert tree.watch().sample(0) is None


def test_our_own_groups_are_read() -> None:
    found = CgroupWatch(os.getpid()).sample(0)
    assert found is None or found.total_s is None or found.total_s >= 0
