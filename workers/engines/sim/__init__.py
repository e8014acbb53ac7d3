"""An engine with vLLM 0.32's HTTP API for chats and completions, and its KV events over ZMQ, that computes nothing.

Text is a hash, time a model, blocks are real.

    python -m workers.engines.sim --model DIR --served-model-name NAME ...     # vLLM's own flags, and --sim-*

blocks    which tokens are cached (LRU, copies, references) and the events that say so
timing    which request gets how many tokens in a step, and how long the step takes; no clock inside
adapters  what vLLM checks in an adapter's files, and its LRU of adapters in host memory. A config with
          `"sim": {"delay_s": 0.4, "failing": 0.5}` is a bad version: late answers, and 500 to that share of prompts
engine    the loop that lets the steps take their time; publisher, metrics, answers, app: what the outside sees
"""
