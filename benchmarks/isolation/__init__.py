"""Private prefix caches: how much an attacker's guesses tell with and without them, and how many hits they lose."""
