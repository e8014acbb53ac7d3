"""Where adapters live: our placement against the rules of others, on one simulated fleet."""
