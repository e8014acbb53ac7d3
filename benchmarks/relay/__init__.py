"""The data plane's benchmark; `python -m benchmarks.relay --help`."""
