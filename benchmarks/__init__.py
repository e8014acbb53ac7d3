"""`python -m benchmarks.<name> [--quick] [--json FILE]`: one table each, contenders in turn in one run, medians."""
