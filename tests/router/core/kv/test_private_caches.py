"""Which salts asked of late, and when their cost is sampled."""

from router.core.kv.private_caches import PrivateCaches


def test_others_are_the_last_salts_of_the_same_adapter():
    caches = PrivateCaches()
    for salt in ("a", "b", "c", "a"):
        caches.record_use("base", "sql@1", salt)
    caches.record_use("base", "", "d")
    assert caches.others("base", "sql@1", "c", most=9) == ["a", "b"]
    assert caches.others("base", "sql@1", "c", most=1) == ["a"]
    assert caches.others("base", "", "d", most=9) == []


def test_salts_are_bounded_and_the_longest_unused_is_forgotten():
    caches = PrivateCaches()
    for number in range(2000):
        caches.record_use("base", "", "first")
        caches.record_use("base", "", str(number))
    found = caches.others("base", "", "", most=5000)
    assert len(found) == 1024
    assert found[:2] == ["1999", "first"]


def test_one_request_in_a_while_is_sampled():
    caches = PrivateCaches()
    taken = [now / 100 for now in range(200) if caches.take_sample(now / 100)]
    assert taken == [at / 4 for at in range(8)]
