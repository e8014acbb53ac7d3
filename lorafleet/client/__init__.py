"""A client of a fleet for Python programs: push adapters, publish the next version of a name, wait until it is ready.

It speaks to a router or an orchestrator. It imports httpx and lorafleet.identity, and nothing of the services.
"""

from lorafleet.client.fleet import AsyncFleet, Fleet
from lorafleet.client.results import FleetError, Published, Pushed, PushProgress

__all__ = ["AsyncFleet", "Fleet", "FleetError", "Published", "PushProgress", "Pushed"]
