"""The command line lists the pauses of a fleet, and ends one."""

from pathlib import Path

import pytest

from lorafleet.local.tiny_model import make_model
from tests.e2e.small_fleets import small_fleet

pytestmark = pytest.mark.fleet


async def test_the_command_line_lists_pauses_and_ends_one(tmp_path: Path) -> None:
    (tmp_path / "shelf").mkdir()
    model = make_model(tmp_path / "model")
    async with small_fleet(tmp_path / "fleet", model, shelf=tmp_path / "shelf", routers=1, tenants=("acme",)) as fleet:
        acme = {"authorization": f"Bearer {fleet.keys['acme']}"}
        (await fleet.routers[0].post("/pause", params={"mode": "keep"}, headers=acme)).raise_for_status()
        status, output = await fleet.cli("pauses", "list")
        assert (status, "tenant acme" in output, "keep" in output) == (0, True, True), output
        status, output = await fleet.cli("pauses", "end", "--tenant", "acme")
        assert (status, "ended: tenant acme" in output) == (0, True), output
        status, output = await fleet.cli("pauses", "end", "--tenant", "acme")
        assert (status, "nothing was paused" in output) == (0, True), output
