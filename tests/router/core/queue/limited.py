"""Whose limits a request of a test counts against."""

from orchestrator.model.limits import LimitedAccount, tenant_account


def of_key(key, limits):
    """A key's account alone."""
    return (LimitedAccount(key, limits),)


def of_tenant(key, limits, tenant_limits):
    """The account of a key of tenant acme, where that has limits, and the tenant's."""
    return (*(of_key(key, limits) if limits else ()), LimitedAccount(tenant_account("acme"), tenant_limits))
