"""Adapters of many model families, as trainers write them, with the verdict of the engine on each.

`families` names the models, `shapes` the adapters. `making` builds both with transformers and PEFT at toy size.
`referee` asks real vLLM about each. `record` runs both and writes `recorded/FAMILY.json`, which tests read.
"""
