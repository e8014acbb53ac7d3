"""The tree of errors: each has its code, and temporary ones say when to come back."""

from router.core.errors import AdapterInspecting, RequestError, RouterError, TemporarilyUnavailable


def test_every_error_has_its_code_and_temporary_ones_retry_after():
    def tree(cls):
        return [cls, *(below for sub in cls.__subclasses__() for below in tree(sub))]

    # For a client an adapter that is being inspected is one without a replica.
    codes = [cls.code for cls in tree(RouterError) if cls is not AdapterInspecting]
    assert len(set(codes)) == len(codes)
    assert all(cls.status < 500 for cls in tree(RequestError))
    assert all(cls("x").retry_after_s for cls in tree(TemporarilyUnavailable))
