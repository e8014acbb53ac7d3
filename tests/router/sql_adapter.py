"""The adapter `sql/v1`, and the answer that says it is ready."""

from tests.router.doubles import (
    DIGEST,
)

SQL = f"sql/v1@{DIGEST[:12]}"


COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
