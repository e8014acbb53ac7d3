"""Metrics about tokens, which each service adds to its own: what was refused, and how old issuers' keys are."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lorafleet.keys.auth import ApiKeys


class TokenCollector(Collector):
    """The families of a server's tokens; without issuers they have no series."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    def collect(self) -> Iterable[Metric]:
        """The refused tokens by reason, and the age of each issuer's keys."""
        refused = CounterMetricFamily("lorafleet_token_refusals", "Tokens refused, by reason.", labels=["reason"])
        for reason, count in self._keys.refused_tokens.items():
            refused.add_metric([reason], count)
        age = GaugeMetricFamily(
            "lorafleet_issuer_keys_age_seconds",
            "Time since the issuer's signing keys were fetched; infinite: never.",
            labels=["issuer"],
        )
        for issuer, age_s in self._keys.signing_keys.ages_s().items():
            age.add_metric([issuer], age_s)
        return refused, age
