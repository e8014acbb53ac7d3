"""Which answers prove that an address is a worker's."""

import dataclasses

import pytest
import yaml

from lorafleet.engine.worker_proofs import AgentProofs, AgentUnproved, ProvedAgent, proof_of
from lorafleet.keys.auth import ApiKeys
from lorafleet.keys.key_files import hash_key, key_id_of
from workers.wire import WORKER_PROOF_PATH, ProofAnswer, ProofRequest

URL = "http://10.0.0.7:8090"
ROWS = [
    {"sha256": hash_key("worker"), "scopes": ["worker", "drain"]},
    {"sha256": hash_key("register"), "scopes": ["register"]},
    {"sha256": hash_key("trainer"), "scopes": ["register", "tenant-admin"], "tenant": "acme"},
    {"sha256": hash_key("old"), "scopes": ["worker"], "expires": "2020-01-01T00:00:00Z"},
]


def agent_of(key: str, name: str = "w0", boot_id: str = "a1") -> ProvedAgent:
    return ProvedAgent(name, boot_id, key_id_of(hash_key(key)))


def answer_of(key: str, asked: ProofRequest, agent: ProvedAgent | None = None, **changed) -> bytes:
    agent = agent or agent_of(key)
    said = {**dataclasses.asdict(agent), "proof": proof_of(hash_key(key), asked, agent)} | changed
    return ProofAnswer.model_validate(said).model_dump_json().encode()


class ProvingFleet:
    """Proofs of one service; `answer` makes what is at an address answer a request."""

    def __init__(self, tmp_path):
        (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"keys": ROWS}))
        self.asked: list[tuple[str, str, ProofRequest]] = []
        self.answer = lambda asked: answer_of("worker", asked)
        self.now = 0.0
        keys = ApiKeys([tmp_path / "keys.yaml"])
        self.proofs = AgentProofs(keys=keys, ask=self.ask, valid_s=2.0, clock=lambda: self.now)

    async def ask(self, url: str, path: str, body: bytes) -> bytes:
        asked = ProofRequest.model_validate_json(body)
        self.asked.append((url, path, asked))
        return self.answer(asked)


@pytest.fixture
def fleet(tmp_path) -> ProvingFleet:
    return ProvingFleet(tmp_path)


async def test_an_address_is_proved_by_the_workers_key_and_asked_again_once_the_proof_is_old(fleet):
    assert not fleet.proofs.is_proved(URL)
    await fleet.proofs.prove(f"{URL}/")
    await fleet.proofs.prove(URL)
    ((url, path, asked),) = fleet.asked
    assert (url, path, asked.url) == (URL, WORKER_PROOF_PATH, URL)
    fleet.now = 2.1
    assert not fleet.proofs.is_proved(URL)
    await fleet.proofs.prove(URL)
    assert len({asked.nonce for _, _, asked in fleet.asked}) == 2


@pytest.mark.parametrize("key", ["register", "trainer", "old", "unknown"])
async def test_a_key_that_is_no_workers_proves_nothing(fleet, key):
    fleet.answer = lambda asked: answer_of(key, asked)
    with pytest.raises(AgentUnproved, match="no valid key with scope `worker`"):
        await fleet.proofs.prove(URL)
    assert not fleet.proofs.is_proved(URL)


@pytest.mark.parametrize(
    "changed",
    [{"nonce": "0" * 64}, {"url": "http://10.0.0.8:8090"}],
    ids=["an answer to another request", "an answer about another address"],
)
async def test_an_answer_to_another_request_proves_nothing(fleet, changed):
    fleet.answer = lambda asked: answer_of("worker", asked.model_copy(update=changed))
    with pytest.raises(AgentUnproved, match="wrong proof"):
        await fleet.proofs.prove(URL)


@pytest.mark.parametrize("changed", [{"instance_id": "w1"}, {"agent_boot_id": "a2"}, {"proof": "0" * 64}])
async def test_no_field_of_an_answer_can_be_changed(fleet, changed):
    fleet.answer = lambda asked: answer_of("worker", asked, **changed)
    with pytest.raises(AgentUnproved, match="wrong proof"):
        await fleet.proofs.prove(URL)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"instance_id": 1}'])
async def test_something_else_at_the_address_proves_nothing(fleet, content):
    fleet.answer = lambda _: content
    with pytest.raises(AgentUnproved, match="no lorafleet agent"):
        await fleet.proofs.prove(URL)


async def test_a_report_is_of_the_agent_at_its_address_alone(fleet):
    await fleet.proofs.prove_sender(URL, agent_of("worker"))
    for other in (agent_of("worker", name="w1"), agent_of("worker", boot_id="a2"), agent_of("register")):
        with pytest.raises(AgentUnproved, match="the report is from"):
            await fleet.proofs.prove_sender(URL, other)
    assert fleet.proofs.is_proved(URL)


async def test_a_restart_is_proved_anew_and_heard_agents_are_not_asked_again(fleet):
    for fleet.now in (0.0, 1.5, 3.0, 4.5):
        await fleet.proofs.prove_sender(URL, agent_of("worker"))
    assert len(fleet.asked) == 1
    restarted = agent_of("worker", boot_id="a2")
    fleet.answer = lambda asked: answer_of("worker", asked, restarted)
    await fleet.proofs.prove_sender(URL, restarted)
    assert len(fleet.asked) == 2


async def test_a_service_without_key_files_asks_for_no_proof():
    proofs = AgentProofs(keys=ApiKeys(()), ask=None, valid_s=1.0, clock=lambda: 0.0)
    await proofs.prove(URL)
    await proofs.prove_sender(URL, agent_of("worker"))
    assert proofs.is_proved(URL)
