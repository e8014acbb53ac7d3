"""What a cache of its own gives a tenant, and costs the fleet: an attacker's guesses, and the hits of a trace."""
