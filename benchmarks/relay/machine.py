"""Cores, and what a process takes of them."""

import os
import platform
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cores() -> tuple[int, int]:
    """(the router's, everybody else's); the same one twice where there is no other."""
    mine = sorted(os.sched_getaffinity(0))
    return mine[0], mine[-1]


@contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """Processes that are started inside run on this core and nowhere else; on any core with None."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cpu_ns(pid: int) -> int:
    """CPU time of a process, its threads and its children so far.

    Exact where the kernel keeps schedstat (the time of a thread that ended is lost), else in ticks of 10 ms.
    """
    total = 0
    for process in family(pid):
        try:
            tasks = [(task / "schedstat").read_text() for task in Path(f"/proc/{process}/task").iterdir()]
            total += sum(int(text.split()[0]) for text in tasks)
        except FileNotFoundError:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) * 10**9 // os.sysconf("SC_CLK_TCK")
    return total


def family(pid: int) -> list[int]:
    """A process and all that it started."""
    found = [pid]
    for process in found:
        for task in Path(f"/proc/{process}/task").iterdir():
            children = task / "children"
            if children.exists():
                found += map(int, children.read_text().split())
    return found


def resident_mb(pid: int) -> float:
    """Resident memory of a process and all that it started."""
    pages = sum(int(Path(f"/proc/{process}/statm").read_text().split()[1]) for process in family(pid))
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def busy_s() -> float:
    """Seconds that the machine's cores have worked, for anybody."""
    user, nice, system, _idle, _waiting, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def own_s() -> float:
    """Seconds of that for us and all that we started and that has ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def stolen_s() -> float:
    """Seconds, over all cores, in which the hypervisor ran somebody else."""
    return int(Path("/proc/stat").read_text().split()[8]) / os.sysconf("SC_CLK_TCK")


def described() -> str:
    """The machine in a line."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"{model[1] if model else platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}"
