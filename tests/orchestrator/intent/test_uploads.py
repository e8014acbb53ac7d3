"""The bytes that a request of an upload announces, and when all of them have come."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.copies import (
    ARCHIVE,
    CONFIG,
    WEIGHTS,
    SentBytes,
    UploadQuota,
    files_still_to_send,
    sent_bytes,
    upload_id,
)
from orchestrator.core.errors import OrchestratorRequestError
from orchestrator.store.upload_store import upload_store


@given(first=st.integers(0, 1000), length=st.integers(1, 1000), more=st.integers(0, 1000))
def test_a_range_says_where_its_bytes_belong(first, length, more):
    last, total = first + length - 1, first + length + more
    found = sent_bytes(f"bytes {first}-{last}/{total}", str(length))
    assert found == SentBytes(first, length, total, is_resumed=first > 0)
    assert sent_bytes(f"bytes {first}-{last}/*", None).total is None
    with pytest.raises(OrchestratorRequestError):
        sent_bytes(f"bytes {first}-{last}/{total}", str(length + 1))
    with pytest.raises(OrchestratorRequestError):
        sent_bytes(f"bytes {first}-{last}/{last}", str(length))


def test_a_request_without_range_begins_anew_and_one_without_bytes_asks_to_finish():
    assert sent_bytes(None, "7") == SentBytes(0, 7, 7, is_resumed=False)
    assert sent_bytes(None, None) == SentBytes(0, None, None, is_resumed=False)
    assert sent_bytes("bytes */9", "0") == SentBytes(None, 0, 9, is_resumed=True)
    assert sent_bytes("bytes */9", None) == SentBytes(None, 0, 9, is_resumed=True)


@given(st.text(max_size=30))
def test_a_header_of_another_form_is_refused_with_its_text(text):
    with pytest.raises(OrchestratorRequestError) as refused:
        sent_bytes(f"octets {text}", None)
    assert (refused.value.code, refused.value.param) == ("invalid_content_range", "Content-Range")


def test_an_upload_is_whole_with_an_archive_or_both_files():
    assert files_still_to_send({}) == (ARCHIVE,)
    assert files_still_to_send({ARCHIVE: (5, 9)}) == (ARCHIVE,)
    assert files_still_to_send({ARCHIVE: (9, 9)}) == files_still_to_send({ARCHIVE: (9, None)}) == ()
    assert files_still_to_send({WEIGHTS: (9, 9)}) == (CONFIG,)
    assert files_still_to_send({WEIGHTS: (8, 9), CONFIG: (2, 2)}) == (WEIGHTS,)
    assert files_still_to_send({WEIGHTS: (9, 9), CONFIG: (2, 2)}) == ()


@given(sizes=st.lists(st.integers(0, 50), max_size=6), new=st.integers(0, 50))
def test_a_tenant_may_begin_an_upload_while_count_and_bytes_are_within_the_quota(sizes, new):
    quota = UploadQuota(uploads=4, size_bytes=100)
    others = {str(number): (f"acme/{number}", size) for number, size in enumerate(sizes)}
    problem = quota.problem(others, new)
    assert (problem == "") == (len(sizes) < 4 and sum(sizes) + new <= 100)
    if problem:
        assert "acme/0" in problem
        assert "DELETE /v1/uploads/" in problem


def test_callers_and_names_have_uploads_of_their_own():
    assert len({upload_id("a", "bc"), upload_id("ab", "c"), upload_id("a", "b")}) == 3
    assert upload_id("a", "b") == upload_id("a", "b")


@pytest.mark.parametrize("setting", ["uploads", "./x", "s3://", "ftp://host/x", "file://relative"])
def test_a_store_that_can_be_none_is_refused_with_the_forms(setting):
    with pytest.raises(ValueError, match="expected an absolute path, or s3://bucket/folder"):
        upload_store(setting)


def test_a_store_names_each_adapters_place_by_its_digest():
    sources = [store.source("d") for text in ("/a b", "file:///x", "s3://b/f/") if (store := upload_store(text))]
    assert sources == ["file:///a%20b/d", "file:///x/d", "s3://b/f/d"]
    assert upload_store("") is None
