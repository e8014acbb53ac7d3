"""File descriptors of a server process: how many clients may be connected, so that what is served gets its own.

Without this bound the process runs out of them: accepted connections are reset one and all, those of complete requests
included, and a router opens no connection to its engines.
"""

import contextlib
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass, field

# What is kept free of all descriptors: an eighth, for files and for connections to other services.
_KEPT_SHARE = 8
_LEAST_KEPT = 16
_MOST_KEPT = 8192
# As most servers; the kernel bounds it further (net.core.somaxconn).
_MOST_BACKLOG = 2048

NO_DESCRIPTORS = "no_descriptors"
"""Code of the error of a client for whom there is no descriptor; `SHORT` is its message."""
SHORT = "this server has as many connections as its limit of open files allows; try again, or raise `ulimit -Hn`"


def kept_free(limit: int) -> int:
    """Descriptors that no client's connection may take."""
    return min(_MOST_KEPT, max(_LEAST_KEPT, limit // _KEPT_SHARE))


def most_clients(limit: int, others: int, each: int) -> int:
    """Most connections of clients, at least one.

    others  descriptors in use for anything but clients and their requests
    each    descriptors that a client's request takes, the client's connection included
    """
    return max(1, (limit - kept_free(limit) - others) // each)


def listen_backlog(limit: int) -> int:
    """Connections that the kernel keeps for a server with so many descriptors, at most half of those kept free.

    An event loop accepts all of them in one turn, before any of them can be closed again. Of more clients than that the
    kernel takes the handshake later, and resets none.
    """
    return min(_MOST_BACKLOG, kept_free(limit) // 2)


def descriptor_limit() -> int:
    """The most descriptors that this process may have."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if limit == resource.RLIM_INFINITY else limit


@dataclass(slots=True)
class DescriptorRoom:
    """The bound on connections of clients in this process.

    each          descriptors that a client's request takes
    peers         how many connections are open for requests of clients, beside the clients' own
    most_clients  as measured last
    """

    each: int = 1
    peers: Callable[[], int] = lambda: 0
    limit: int = field(default=0, init=False)
    _others: int = field(default=0, init=False)
    most_clients: int = field(default=1, init=False)

    @property
    def most_ending(self) -> int:
        """Most connections that only wait for their client to read a last response."""
        return kept_free(self.limit) // 2

    def measure(self, clients: int) -> None:
        """Set `most_clients` by what else is open now. Lists the descriptors only where many may be in use."""
        limit = descriptor_limit()
        if limit != self.limit or (clients * self.each + self._others) * _KEPT_SHARE > limit:
            self.limit = limit
            with contextlib.suppress(OSError):  # not Linux, or none is left to list them with: as measured before
                self._others = max(0, sum(1 for _ in os.scandir("/proc/self/fd")) - 1 - clients - self.peers())
        self.most_clients = most_clients(limit, self._others, self.each)
