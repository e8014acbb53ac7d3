"""A simulated engine with vLLM 0.32's HTTP API for chats and completions, and its KV events over ZMQ.

Text is pseudo-random, step times come from a model, KV blocks are managed as in vLLM.

    python -m lorafleet.sim --model DIR --served-model-name NAME ...     # vLLM's own flags, and --sim-*

blocks    the KV cache: blocks with references, copies and LRU eviction, and their KV events
timing    scheduling of requests in steps, and the duration of a step; without a clock
adapters  vLLM's checks of an adapter's files. A config with `"sim": {"delay_s": 0.4, "failing": 0.5}` simulates a bad
          version: answers are late, and that share of prompts gets 500. `--lora-target-modules` makes the engine ignore
          the other modules, as vLLM does, without an error; `--sim-uncalled` names modules that it takes and never runs
engine    the loop that runs steps in real time
app       the HTTP routes, with prompts, generation, bodies and answers; publisher and metrics
"""
