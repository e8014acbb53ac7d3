"""The adapters of `make demo-real`: their texts, and their training."""
