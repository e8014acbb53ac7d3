"""Upgrades and rollbacks of all objects of the chart, applied on the server (Helm 4) or on the client (Helm 3, and Helm
4 for releases that began so), with and without manual changes in between.
"""

import asyncio
import re

import pytest
import yaml

from tests.helm.releases import HelmRelease
from tests.helm.rendering import CHART, RELEASE
from tests.kube.api import connected
from tests.kube.binaries import BinaryMissing, helm, helm_3

pytestmark = pytest.mark.fleet

SERVER, CLIENT, HELM_3 = "Helm 4 on the server", "Helm 4 on the client", "Helm 3"
WAYS = pytest.mark.parametrize("way", [SERVER, CLIENT, HELM_3])
WORDS = {SERVER: ["--server-side=true"], CLIENT: ["--server-side=false"], HELM_3: []}
NAMES = {
    "statefulset": "fleet-lorafleet-p",
    "deployment": "fleet-lorafleet-router",
    "orchestrator": "fleet-lorafleet-orchestrator",
}
KINDS = {"statefulset": "statefulset", "deployment": "deployment", "orchestrator": "deployment"}
SCALES = "/apis/apps/v1/namespaces/{namespace}"


class Upgrades:
    """One release of a pool of six workers and four routers."""

    def __init__(self, release: HelmRelease, kube, folder, way: str) -> None:
        self.release, self.kube, self._way = release, kube, way
        self._file = folder / "given.yaml"
        self._count = 0

    async def tried(self, verb: str, *words: str, pool=None, **values):
        """helm's output for an installation or upgrade with these values."""
        pool = {"name": "p", "engine": "sim", "demoModel": True, "replicas": 6, **(pool or {})}
        # Something changes each time, as in an upgrade that is worth one.
        self._count += 1
        orchestrator = {"podAnnotations": {"example.com/upgrade": str(self._count)}}
        given = {"router": {"replicas": 4}, "pools": [pool], "orchestrator": orchestrator}
        self._file.write_text(yaml.safe_dump(given | values))
        self.release.program = helm_3 if self._way == HELM_3 else helm
        return await self.release.tried(
            verb, RELEASE, str(CHART), "--values", str(self._file), *WORDS[self._way], *words
        )

    async def __call__(self, verb: str, *words: str, **values) -> str:
        done = await self.tried(verb, *words, **values)
        assert done.returncode == 0, done.stderr
        return done.stdout

    async def replicas(self, kind: str) -> int:
        output = await self.release.kubectl("get", KINDS[kind], NAMES[kind], "-o", "jsonpath={.spec.replicas}")
        return int(output)

    async def numbers(self) -> list[int]:
        """Workers and routers that the cluster is to have."""
        return [await self.replicas(kind) for kind in ("statefulset", "deployment")]

    async def by_autoscaler(self, kind: str, replicas: int) -> None:
        """As the HorizontalPodAutoscaler's controller writes it, KEDA's too."""
        async with connected(self.kube.kubeconfig) as api:
            code, output = await api.ask(
                "PATCH",
                f"{SCALES}/{KINDS[kind]}s/{NAMES[kind]}/scale",
                {"spec": {"replicas": replicas}},
                kind="application/merge-patch+json",
                fieldManager="kube-controller-manager",
            )
        assert code == 200, output

    async def handed_over(self, refusal: str) -> None:
        """Run the command of a refusal that gives numbers of replicas to the autoscaler."""
        found = re.search(r"echo '(.*)' \| kubectl (.*) -f -", refusal)
        assert found, refusal
        await self.release.kubectl(*found[2].split(), "-f", "-", stdin=found[1])

    async def rolled_back(self, revision: int):
        self.release.program = helm_3 if self._way == HELM_3 else helm
        return await self.release.tried("rollback", RELEASE, str(revision), *WORDS[self._way])

    async def by_hand(self, kind: str, replicas: int) -> None:
        await self.release.kubectl("scale", KINDS[kind], NAMES[kind], "--replicas", str(replicas))


@pytest.fixture
def upgrades(release, kube, tmp_path, way) -> Upgrades:
    if way == HELM_3:
        try:
            helm_3()
        except BinaryMissing as exc:  # Helm 4's own code for clients asks the same
            pytest.skip(str(exc))
    return Upgrades(release, kube, tmp_path, way)


SCALED = {"enabled": True, "type": "hpa", "maxReplicas": 12}


BOTH = {"pool": {"autoscaling": SCALED}, "router": {"replicas": 4, "autoscaling": SCALED}}


@WAYS
async def test_turning_on_autoscaling_takes_no_worker_and_no_router_away(upgrades, way):
    await upgrades("install")
    if way == SERVER:
        done = await upgrades.tried("upgrade", **BOTH)
        assert "Deployment fleet-lorafleet-router (4) and StatefulSet fleet-lorafleet-p (6)" in done.stderr
        await upgrades.handed_over(done.stderr)
    await upgrades("upgrade", **BOTH)
    assert await upgrades.numbers() == [6, 4]
    await upgrades.by_autoscaler("statefulset", 9)
    await upgrades.by_autoscaler("deployment", 2)
    await upgrades("upgrade", **BOTH)
    assert await upgrades.numbers() == [9, 2]

    notes = await upgrades("upgrade")
    assert await upgrades.numbers() == [9, 2]
    output = "StatefulSet fleet-lorafleet-p keeps its 9 replicas, which kube-controller-manager has set"
    assert f"{output}, though values say 6." in notes
    await upgrades("upgrade", **BOTH)
    assert await upgrades.numbers() == [9, 2]


@WAYS
@pytest.mark.parametrize("kind", ["hpa", "external"])
async def test_no_manifest_of_a_release_that_begins_with_autoscaling_has_a_number(upgrades, kind):
    """So no rollback can take a worker away: it applies an older manifest, without a look at the cluster."""
    scaled = SCALED | {"type": kind}
    both = {"pool": {"autoscaling": scaled}, "router": {"replicas": 4, "autoscaling": scaled}}
    await upgrades("install", **both)
    assert await upgrades.numbers() == [1, 1]  # until the autoscaler's first pass, which brings minReplicas
    made = await upgrades.release.kubectl("get", "hpa", "-o", "name")
    assert len(made.split()) == (2 if kind == "hpa" else 0)
    await upgrades("upgrade", **both)
    await upgrades.by_autoscaler("statefulset", 14)
    await upgrades.by_autoscaler("deployment", 3)
    await upgrades("upgrade", **both)
    for revision in (1, 2, 3):
        manifest = (await upgrades.release.helm("get", "manifest", RELEASE, "--revision", str(revision))).stdout
        numbers = {
            item["metadata"]["name"]: item["spec"].get("replicas")
            for item in yaml.safe_load_all(manifest)
            if item["kind"] in {"StatefulSet", "Deployment"}
        }
        assert numbers == {NAMES["statefulset"]: None, NAMES["deployment"]: None, NAMES["orchestrator"]: 2}
        done = await upgrades.rolled_back(revision)
        assert done.returncode == 0, done.stderr
        assert await upgrades.numbers() == [14, 3]


@WAYS
async def test_an_upgrade_while_an_autoscaler_acts_neither_fails_nor_changes_its_number(upgrades):
    await upgrades("install", **BOTH)
    set_last = 0

    async def act() -> None:
        nonlocal set_last
        for number in range(2, 10_000):
            await upgrades.by_autoscaler("statefulset", number)
            await upgrades.by_autoscaler("deployment", number)
            set_last = number

    acting = asyncio.create_task(act())
    for _ in range(2):
        before = set_last
        await upgrades("upgrade", **BOTH)
        assert min(await upgrades.numbers()) >= before
    acting.cancel()
    await asyncio.gather(acting, return_exceptions=True)
    assert min(await upgrades.numbers()) >= set_last > 2


@WAYS
async def test_a_number_set_by_hand_stays_and_the_notes_say_how_to_change_it(upgrades):
    asked = {"statefulset": 6, "deployment": 4, "orchestrator": 2}
    await upgrades("install")
    for kind in asked:
        await upgrades.by_hand(kind, 3)
    for _ in range(2):
        notes = await upgrades("upgrade")
        for kind in asked:
            assert await upgrades.replicas(kind) == 3
            assert f"{NAMES[kind]} keeps its 3 replicas, which kubectl has set" in notes
    commands = [line.split() for line in notes.splitlines() if " scale " in line]
    for command in commands:
        assert command[0] == "kubectl"
        await upgrades.release.kubectl(*command[1:])
    assert {kind: await upgrades.replicas(kind) for kind in asked} == asked
    assert "keeps its" not in await upgrades("upgrade")


async def _change_after_hands(upgrades):
    await upgrades("install")
    await upgrades.by_hand("statefulset", 3)
    await upgrades("upgrade")
    return await upgrades.tried("upgrade", pool={"replicas": 8})


@pytest.mark.parametrize("way", [SERVER])
async def test_another_number_in_values_than_by_hand_is_refused_before_anything_changes(upgrades):
    done = await _change_after_hands(upgrades)
    assert done.returncode != 0
    what = "StatefulSet fleet-lorafleet-p: values say 8 replicas now, and kubectl has set 3; nothing is changed."
    assert what in done.stderr
    assert await upgrades.replicas("statefulset") == 3
    await upgrades("upgrade", "--force-conflicts", pool={"replicas": 8}, keepScaled=False)
    assert await upgrades.replicas("statefulset") == 8
    await upgrades("upgrade", pool={"replicas": 7})
    assert await upgrades.replicas("statefulset") == 7


@pytest.mark.parametrize("way", [CLIENT, HELM_3])
async def test_another_number_in_values_than_by_hand_counts_where_clients_apply(upgrades):
    done = await _change_after_hands(upgrades)
    assert done.returncode == 0, done.stderr
    assert await upgrades.replicas("statefulset") == 8


@pytest.mark.parametrize("way", [SERVER])
async def test_a_rollback_takes_back_what_hands_have_set_only_by_force(upgrades):
    await upgrades("install")
    await upgrades.by_hand("statefulset", 3)
    await upgrades("upgrade")
    done = await upgrades.release.tried("rollback", RELEASE, "1")
    assert 'conflict with "kubectl" with subresource "scale"' in done.stderr
    assert await upgrades.replicas("statefulset") == 3
    await upgrades.release.helm("rollback", RELEASE, "2", "--force-conflicts")  # made after the hands
    assert await upgrades.replicas("statefulset") == 3
    await upgrades.release.helm("rollback", RELEASE, "1", "--force-conflicts")
    assert await upgrades.replicas("statefulset") == 6


@WAYS
async def test_hands_that_the_guide_recommends_are_in_no_upgrades_way(upgrades):
    await upgrades("install")
    for kind in ("statefulset", "deployment"):
        await upgrades.release.kubectl("rollout", "restart", kind, NAMES[kind])
        await upgrades.release.kubectl("annotate", kind, NAMES[kind], "example.com/by=hand")
        await upgrades.release.kubectl("label", kind, NAMES[kind], "by=hand")
    await upgrades("upgrade", pool={"replicas": 8})
    assert await upgrades.replicas("statefulset") == 8


@pytest.mark.parametrize("way", [CLIENT, HELM_3])
async def test_a_release_goes_over_from_the_client_to_the_server(upgrades, release, kube, tmp_path):
    server = Upgrades(release, kube, tmp_path, SERVER)
    await upgrades("install")
    await upgrades.by_hand("statefulset", 3)
    await server("upgrade")
    assert await server.replicas("statefulset") == 3
    await server("upgrade", pool={"autoscaling": SCALED})
    assert await server.replicas("statefulset") == 3
    assert "keeps its 3 replicas" in await server("upgrade")


VOLUMES = {"enabled": True, "storageClassName": "fast"}


@pytest.mark.parametrize("way", [SERVER, CLIENT])
async def test_volumes_that_are_there_are_not_changed_and_the_refusal_says_what_to_do(upgrades):
    cache = {"size": "10Gi", "persistent": VOLUMES}
    await upgrades("install", pool={"cache": cache})
    await upgrades("upgrade", pool={"cache": cache})
    for other, output in [
        (cache | {"size": "20Gi"}, "cache.size is 20Gi now, and its workers' volumes were made with 10Gi"),
        ({"persistent": {"enabled": False}}, "cache.persistent.enabled is false now, and its workers have volumes of"),
        (cache | {"persistent": VOLUMES | {"storageClassName": "slow"}}, 'storageClassName is "slow" now'),
    ]:
        done = await upgrades.tried("upgrade", pool={"cache": other})
        assert done.returncode != 0
        assert f"pool p: {output}" in done.stderr.replace("cache.persistent.storageClassName", "storageClassName")
    command = done.stderr.split("run kubectl ")[1].split(",")[0]
    await upgrades.release.kubectl(*command.split())
    await upgrades("upgrade", pool={"cache": cache | {"size": "20Gi"}})


@pytest.mark.parametrize("way", [SERVER])
@pytest.mark.parametrize("is_scaled", [True, False], ids=["by an autoscaler", "by hand"])
async def test_larger_volumes_as_the_refusal_says_end_no_worker_of_a_pool_that_was_scaled(upgrades, is_scaled):
    pool = {"cache": {"size": "10Gi", "persistent": VOLUMES}, "autoscaling": SCALED if is_scaled else {}}
    await upgrades("install", pool=pool)
    await (upgrades.by_autoscaler if is_scaled else upgrades.by_hand)("statefulset", 9)
    pool |= {"cache": {"size": "20Gi", "persistent": VOLUMES}}
    refusal = (await upgrades.tried("upgrade", pool=pool)).stderr
    once: dict = {}
    if "in values once, " in refusal:
        once = yaml.safe_load("{" + refusal.split("with ")[-1].split(" in values once, ")[0] + "}")
        once["autoscaling"] = {"enabled": once.pop("autoscaling.enabled", is_scaled)}
    await upgrades.release.kubectl(*refusal.split("run kubectl ")[1].split(",")[0].split())
    await upgrades("upgrade", pool=pool | once)
    assert await upgrades.replicas("statefulset") == 9
    if is_scaled:
        await upgrades.handed_over((await upgrades.tried("upgrade", pool=pool)).stderr)
    await upgrades("upgrade", pool=pool | ({} if is_scaled else {"replicas": 9}))
    assert await upgrades.replicas("statefulset") == 9


@pytest.mark.parametrize("way", [SERVER])
async def test_a_pool_that_is_to_have_volumes_and_has_none_is_told_so(upgrades):
    await upgrades("install")
    done = await upgrades.tried("upgrade", pool={"cache": {"persistent": VOLUMES}})
    assert "cache.persistent.enabled is true now, and its workers have no volumes of their own" in done.stderr
    await upgrades("upgrade", pool={"cache": {"size": "1Gi"}})  # an emptyDir's may change


@pytest.mark.parametrize("way", [SERVER])
async def test_a_pool_of_another_kind_does_not_end_all_workers_of_the_one_that_is_there(upgrades):
    await upgrades("install")
    done = await upgrades.tried("upgrade", pool={"kind": "Deployment"})
    output = "pool p: kind is Deployment now, and its workers are a StatefulSet's: all of them would end at once."
    assert output in done.stderr
    assert await upgrades.replicas("statefulset") == 6
