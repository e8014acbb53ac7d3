"""What a decision costs: hash, match, decide, by the number of replicas."""

from array import array
from random import Random
from types import MappingProxyType

from benchmarks.report import Row, arguments, medians_us, show
from lorafleet.kv.blocks import block_hashes, root_hash
from router.core.fleet import Replica, Resident
from router.core.index import KvIndex
from router.core.load import LoadBook
from router.core.policy import Ask, Costs, decide

PROMPT_TOKENS, BLOCK_SIZE, ADAPTERS = 8192, 16, 1000


def a_fleet(replicas: int) -> list[Replica]:
    names = [f"adapter-{n}/v1@{n:012x}" for n in range(ADAPTERS)]
    residents = MappingProxyType({n: Resident(n.split("@", maxsplit=1)[0], "", n) for n in names})
    return [
        Replica(
            id=f"w{i}",  # type: ignore[arg-type]
            base_model="m",
            engine_url="",
            agent_url="",
            dialect="vllm",
            state="ready",
            block_size=BLOCK_SIZE,
            max_loras=8,
            max_num_seqs=64,
            max_model_len=32768,
            residents=residents,
        )
        for i in range(replicas)
    ]


def rows_for(replicas: int, reach_match_us: float | None, *, rounds: int, calls: int) -> list[Row]:
    """The figures for one size of fleet: replica i holds a share i / n of the prompt."""
    rng = Random(7)
    tokens = array("I", (rng.randrange(150_000) for _ in range(PROMPT_TOKENS)))
    name = "adapter-7/v1@000000000007"
    root = root_hash("m", name)
    fleet, index, book = a_fleet(replicas), KvIndex(BLOCK_SIZE), LoadBook()
    hashes = block_hashes(tokens, block_size=BLOCK_SIZE, root=root)
    for i, replica in enumerate(fleet, start=1):
        index.hold(replica.id, hashes[: len(hashes) * i // replicas])

    def matched() -> dict[str, int]:
        return index.match(block_hashes(tokens, block_size=BLOCK_SIZE, root=root))

    def decided() -> object:
        return decide(
            Ask("m", name, PROMPT_TOKENS),
            fleet,
            matched(),
            lambda r: book.own(r.id, r.report),
            rho=0.3,
            costs=Costs(),
            rng=rng,
            now=0.0,
        )

    found = medians_us(
        {
            "hash": lambda: block_hashes(tokens, block_size=BLOCK_SIZE, root=root),
            "match": lambda: index.match(hashes),
            "hash + match": matched,
            "hash + match + decide": decided,
        },
        rounds=rounds,
        calls=calls,
    )
    reach = {"hash + match": reach_match_us}
    return [
        Row(f"{what}, {PROMPT_TOKENS} tokens, {replicas} replicas", value, "us", reach.get(what))
        for what, value in found.items()
    ]


def main() -> None:
    options = arguments(__doc__ or "")
    size = {"rounds": 3, "calls": 50} if options.quick else {"rounds": 15, "calls": 300}
    rows = [row for replicas, reach in ((8, 100.0), (64, 150.0)) for row in rows_for(replicas, reach, **size)]
    show("decision", rows, options.json)


if __name__ == "__main__":
    main()
