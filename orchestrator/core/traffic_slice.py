"""All traffic of one slice of time: every series, and the shares of those that are divided. Pure."""

from dataclasses import dataclass, field

from orchestrator.core.traffic import OTHER, SeriesKey, TrafficSums, bounded, summed
from orchestrator.core.traffic_shares import MOST_SHARES, Shares, SharesKey, add_shares, folded


@dataclass(slots=True)
class TrafficSlice:
    """Series and shares of one time. `shares` is empty in slices too fine for them."""

    series: dict[SeriesKey, TrafficSums] = field(default_factory=dict)
    shares: dict[SharesKey, Shares] = field(default_factory=dict)

    def series_of(self, key: SeriesKey) -> TrafficSums:
        """The sums of a series, begun where there are none."""
        found = self.series.get(key)
        if found is None:
            found = self.series[key] = TrafficSums()
        return found

    def bounded(self, most: int) -> "TrafficSlice":
        """This slice with at most so many series of each kind, and at most so many shares of each as are kept.

        The other series are one, with shares of its own.
        """
        series = bounded(self.series, most)
        shares: dict[SharesKey, Shares] = {}
        for (kind, name, by), parts in self.shares.items():
            key = (kind, name if (kind, name) in series else OTHER, by)
            if key in shares or key[1] == OTHER:
                add_shares(shares.setdefault(key, {}), parts)
            else:
                shares[key] = parts
        return TrafficSlice(series, {key: folded(parts, MOST_SHARES[key[2]]) for key, parts in shares.items()})

    def copied(self) -> "TrafficSlice":
        """A copy that another thread may read."""
        return TrafficSlice(
            {key: summed([sums]) for key, sums in self.series.items()},
            {key: {name: part.copied() for name, part in shares.items()} for key, shares in self.shares.items()},
        )
