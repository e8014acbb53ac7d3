"""One prepared run for a machine with a GPU and vLLM, of at most eight minutes: `make test-gpu`."""
