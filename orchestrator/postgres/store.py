"""The parts of a store in PostgreSQL, put together: the backend and the lease, each over a connection of its own."""

import secrets
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

from orchestrator.postgres.backend import PostgresBackend
from orchestrator.postgres.database import DatabaseSession, read_address
from orchestrator.postgres.lease import PostgresLease

_CALL_S = 10.0  # one transaction: a thousand rows take a fraction of a second


class PostgresStore:
    """The backend and the lease of one orchestrator.

    address, file  the database's address, or the file that has it
    holder         our name in the lease: a new random one, with the host's, for people who read the lease
    on_undone      called when a refused write was taken back
    lease_call_s   deadline of one read or write of the lease
    usage_kept_days  days for which the ledger's rows are kept
    """

    def __init__(
        self,
        address: str,
        file: Path | None,
        *,
        on_undone: Callable[[], None],
        give_up_s: float,
        lease_call_s: float,
        usage_kept_days: int,
    ) -> None:
        read = partial(read_address, address, file)
        self.holder = f"{socket.gethostname()}_{secrets.token_hex(8)}"
        self.lease = PostgresLease(DatabaseSession(read, call_s=lease_call_s))
        self.backend = PostgresBackend(
            DatabaseSession(read, call_s=_CALL_S),
            holder=self.holder,
            on_undone=on_undone,
            give_up_s=give_up_s,
            usage_kept_days=usage_kept_days,
        )
