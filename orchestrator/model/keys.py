"""Keys of the key files, as the orchestrator shows them."""

from orchestrator.model.documents import ServiceDocument


class KeyItem(ServiceDocument):
    """A key of the key files; never the key or its hash. `note`: the file's comment, for readers above tenants."""

    key_id: str
    tenant: str | None
    scopes: tuple[str, ...]
    limits: dict[str, float]
    expires: str | None
    note: str = ""


class KeyList(ServiceDocument):
    data: tuple[KeyItem, ...]
    next: str | None = None
