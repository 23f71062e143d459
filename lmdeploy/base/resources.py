"""Cores, memory and CPU of the machine, within the limits of control groups (cgroups(7))."""

from __future__ import annotations

import os
import platform
from pathlib import PurePosixPath

_ROOT = "/sys/fs/cgroup"


def cpu_quota() -> float | None:
    """Return the smallest CPU quota of the group and its ancestors in cores, or None."""
    quotas = [_quota(read_kernel(f"{folder}/cpu.max")) for folder in _folders("")]
    for folder in _folders("cpu"):
        quota = read_kernel(f"{folder}/cpu.cfs_quota_us")
        period = read_kernel(f"{folder}/cpu.cfs_period_us")
        quotas.append(_quota(f"{quota} {period}"))
    return min((quota for quota in quotas if quota is not None), default=None)


def memory_left() -> int | None:
    """Return the bytes that the group and its ancestors still allow; None means no limit."""
    left = [
        _memory_left(folder, "memory.max", used="memory.current", prefix="")
        for folder in _folders("")
    ] + [
        _memory_left(folder, "memory.limit_in_bytes", used="memory.usage_in_bytes", prefix="total_")
        for folder in _folders("memory")
    ]
    return min((value for value in left if value is not None), default=None)


def _quota(text: str) -> float | None:
    # Without a quota, version 2 has "max" and version 1 has -1.
    words = text.split()
    if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]) > 0:
        return int(words[0]) / int(words[1])
    return None


def _memory_left(folder: str, limit: str, *, used: str, prefix: str) -> int | None:
    max_bytes = read_kernel(f"{folder}/{limit}").strip()
    used_bytes = read_kernel(f"{folder}/{used}").strip()
    if not max_bytes.isdigit() or not used_bytes.isdigit():
        return None
    # The kernel can reclaim cached pages of files, recently used ones too.
    names = (f"{prefix}inactive_file ", f"{prefix}active_file ")
    lines = read_kernel(f"{folder}/memory.stat").splitlines()
    cached = sum(int(line.split()[1]) for line in lines if line.startswith(names))
    return max(int(max_bytes) - int(used_bytes) + cached, 0)


def _folders(controller: str) -> list[str]:
    """Return the folders of this process's group and of all its ancestors.

    `controller` names a controller of cgroups version 1; "" selects version 2. A container may see
    its group as the root, but the path is the host's: then some of these folders do not exist.
    """
    # A group's name may contain any other character at which splitlines() would split.
    for line in read_kernel("/proc/self/cgroup").split("\n"):
        _, _, rest = line.partition(":")
        controllers, found, path = rest.partition(":")
        if found and controller in controllers.split(","):
            root = f"{_ROOT}/{controller}" if controller else _ROOT
            group = PurePosixPath(path)
            return [root + str(folder).rstrip("/") for folder in (group, *group.parents)]
    return []


def read_kernel(path: str) -> str:
    """Return the text of a file in /proc or /sys, or "" if it cannot be read.

    Bytes that are not UTF-8 become surrogate escapes.
    """
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def cpu_name() -> str:
    """Return the model name of the first core."""
    return cpu_info("model name") or platform.machine()


def cpu_info(key: str) -> str:
    """Return a line of /proc/cpuinfo for the first core, or "" if it has none."""
    for line in read_kernel("/proc/cpuinfo").splitlines():
        if line.startswith(key):
            return line.partition(":")[2].strip()
    return ""


def usable_cores() -> int:
    """Return the number of cores in the CPU affinity, limited by the CPU quota of the cgroup."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    return cores if quota is None else min(cores, max(1, int(-(-quota // 1))))


def free_memory_bytes() -> int:
    """Return the usable memory in bytes: MemAvailable, limited by the cgroup."""
    free = 0
    for line in read_kernel("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    if free == 0:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    left = memory_left()
    return free if left is None else min(free, left)
