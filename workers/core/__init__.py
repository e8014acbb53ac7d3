"""Pure functions: adapter checks, slots, eviction, retries. No socket, clock or environment: time is an argument."""
