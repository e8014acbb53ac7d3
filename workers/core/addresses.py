"""IP addresses that https:// sources may have, as tenants choose their hosts."""

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_NEVER_PUBLIC = (
    ip_network("192.0.0.0/24"),  # IETF protocols; Oracle's cloud answers with its metadata at 192.0.0.192
    ip_network("168.63.129.16/32"),  # Azure's host, on a public address
    ip_network("fec0::/10"),  # a site's own, until RFC 3879; networks of that time still use them
)
_NAT64 = ip_network("64:ff9b::/96")


def parse_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Networks as `10.0.0.0/8` or a single address; raises ValueError."""
    return tuple(ip_network(text) for text in texts)


def is_allowed(address: str, allowed: Iterable[Network]) -> bool:
    """Whether an address is public unicast or in the allowed networks.

    Private, loopback, link-local (cloud metadata) and reserved ranges are not public. An IPv6 address that embeds an
    IPv4 address is checked as that IPv4 address.
    """
    ip = _embedded_ipv4_or_same(ip_address(address.partition("%")[0]))
    if any(ip.version == network.version and ip in network for network in allowed):
        return True
    if any(ip.version == network.version and ip in network for network in _NEVER_PUBLIC):
        return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved and not ip.is_private


def _embedded_ipv4_or_same(address: Address) -> Address:
    """The IPv4 address that an IPv6 address embeds (NAT64, mapped, 6to4); else the address."""
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address
