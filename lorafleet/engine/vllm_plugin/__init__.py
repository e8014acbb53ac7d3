"""lorafleet's plug-in of vLLM, and the files by which it and an agent tell each other what the engine has and may load.

`patches` and `cpu` change vLLM in its own processes; the other modules write and read the files, on both sides. May
import `service`.
"""


def register() -> None:
    """Entry point `lorafleet` of `vllm.general_plugins`, called in each process of any vLLM in this environment."""
    from lorafleet.engine.vllm_plugin import cpu, patches  # noqa: PLC0415  (agents need the files' modules alone)

    cpu.apply_fixes()
    patches.report_loads()
    patches.take_offers()
