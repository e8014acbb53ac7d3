from lorafleet.identity import block_hashes, root_hash
from router.core.kv.cache_disclosure import CacheDisclosure


def prompt(n, start=0):
    return block_hashes(range(start, start + n), block_size=2, root=root_hash("m"))


def test_a_tenant_has_credit_for_the_longest_prefix_that_it_sent_and_for_nothing_of_its_neighbours():
    credit = CacheDisclosure()
    credit.record_prompt("acme", prompt(8))
    assert credit.disclosed_depth("acme", prompt(12)) == 4
    assert credit.disclosed_depth("acme", prompt(4)) == 2
    assert credit.disclosed_depth("acme", prompt(8, start=1)) == 0
    assert credit.disclosed_depth("rival", prompt(8)) == 0


def test_what_is_kept_is_bounded_and_the_oldest_prompts_ends_go_first():
    credit = CacheDisclosure(most_blocks=5)
    credit.record_prompt("acme", prompt(8))
    credit.record_prompt("acme", prompt(4, start=100))
    assert credit.disclosed_depth("acme", prompt(4, start=100)) == 2
    assert credit.disclosed_depth("acme", prompt(8)) == 3
