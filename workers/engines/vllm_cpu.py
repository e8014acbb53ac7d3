"""The old name of `lorafleet.engine.vllm_cpu`. Goes with the next release.

An environment that was made before the move names this module as vLLM's plugin.
"""

from lorafleet.engine.vllm_cpu import main, register

__all__ = ["main", "register"]

if __name__ == "__main__":
    main()
