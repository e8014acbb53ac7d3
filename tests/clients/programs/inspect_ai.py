"""Inspect: an evaluation of two samples with a tool, by three of its providers."""

import os
from importlib.metadata import version

from inspect_ai import Task, eval  # noqa: A004
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool

url, name = os.environ["STUB"], os.environ["MODEL"]
print("version", version("inspect-ai"))


@tool
def read_note():
    async def execute(name: str) -> str:
        """Read a note.

        Args:
            name: of the note
        """
        return "The key is under the mat."

    return execute


config = GenerateConfig(max_tokens=16, max_retries=0, temperature=0)
key = {"api_key": "key-of-nobody", "config": config}
for model in (
    get_model(f"openai-api/fleet/{name}", base_url=f"{url}/v1", **key),
    get_model(f"openai/{name}", base_url=f"{url}/v1", **key),
    get_model(f"anthropic/{name}", base_url=url, **key),
    get_model(f"vllm/{name}", base_url=f"{url}/v1", **key),
):
    task = Task(
        [Sample("Where is the key?", target="mat")], solver=[use_tools(read_note()), generate()], scorer=includes()
    )
    eval(task, model=model, display="none", log_dir=os.environ["WORK"], fail_on_error=False)
