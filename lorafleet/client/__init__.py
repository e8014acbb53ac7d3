"""A client of a fleet for Python programs: push adapters, publish the next version of a name, wait until it is ready.

Before that, `write_acceptance` and `certify_peft` write down what the trainer computes (docs/acceptance.md).

It speaks to a router or an orchestrator. It imports httpx and lorafleet.identity, and nothing of the services.
"""

from lorafleet.client.certify import certify_peft, write_acceptance
from lorafleet.client.fleet import AsyncFleet, Fleet
from lorafleet.client.results import FleetError, Published, Pushed, PushProgress

__all__ = [
    "AsyncFleet",
    "Fleet",
    "FleetError",
    "Published",
    "PushProgress",
    "Pushed",
    "certify_peft",
    "write_acceptance",
]
