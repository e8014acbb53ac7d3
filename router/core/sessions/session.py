"""The session of a request, by the names that its client gives."""

from typing import NamedTuple


class Session(NamedTuple):
    """The session of a request, as named by its client, or within its tenant.

    name     empty: none is named
    parent   the session that started it; empty: none did
    root     the session of its whole program, where the client names that; empty: it follows from the parents
    is_over  this is its last request
    tenant   whose names these are; empty: none, or they are as the client wrote them
    """

    name: str = ""
    parent: str = ""
    root: str = ""
    is_over: bool = False
    tenant: str = ""


NO_SESSION = Session()
