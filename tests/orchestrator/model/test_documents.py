"""Bodies of people refuse unknown keys; those of our own processes ignore them."""

import pytest
from pydantic import ValidationError

from orchestrator.model.documents import ServiceDocument, WrittenDocument


class CountAnswer(ServiceDocument):
    count: float


class CountBody(WrittenDocument):
    count: float


def test_an_unknown_key_of_another_process_is_ignored():
    assert CountAnswer.model_validate({"count": 1, "newer": True}).model_dump() == {"count": 1}


@pytest.mark.parametrize("body", [{"count": 1, "cuont": 2}, {"count": float("inf")}, {"count": float("nan")}])
def test_a_typing_error_and_a_number_that_is_none_are_refused(body):
    with pytest.raises(ValidationError):
        CountBody.model_validate(body)


def test_documents_are_frozen():
    for made in (CountAnswer(count=1), CountBody(count=1)):
        with pytest.raises(ValidationError, match="frozen"):
            made.count = 2
