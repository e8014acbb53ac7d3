"""Where adapters come from."""
