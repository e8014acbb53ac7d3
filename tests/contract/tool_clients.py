"""Client libraries that call one tool: what each gets from a server, whole and streamed.

A client takes a server's base URL, a model and whether to stream, and returns the calls that its user sees. Libraries
that are not installed are in the extra `clients`.
"""

import asyncio
import importlib.util
import json
import os
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

QUESTION = "What is the weather in Bern for the next days?"
NAME, DESCRIPTION = "weather", "The weather of a city"
# Few values, so that a tiny model finishes its call soon.
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Bern", "Rome", "Oslo"]},
        "days": {"type": "integer", "enum": [1, 2, 3]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS}}
CHOICE = {"type": "function", "function": {"name": NAME}}
MAX_TOKENS = 300
KEY = "any"
TIMEOUT_S = 300.0


class ToolCall(NamedTuple):
    """A tool call as a client shows it: the tool's name, and its arguments, parsed."""

    name: str
    arguments: Mapping[str, Any]


Client = Callable[[str, str, bool], Awaitable[list[ToolCall]]]


async def openai_sdk(url: str, model: str, stream: bool) -> list[ToolCall]:
    """OpenAI's SDK: chat completions."""
    from openai import AsyncOpenAI

    ask: dict[str, Any] = {
        "model": model, "messages": [{"role": "user", "content": QUESTION}], "tools": [TOOL], "tool_choice": CHOICE,
        "max_tokens": MAX_TOKENS, "temperature": 0,
    }  # fmt: skip
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=TIMEOUT_S) as client:
        if stream:
            async with client.chat.completions.stream(**ask) as events:
                answer = await events.get_final_completion()
        else:
            answer = await client.chat.completions.create(**ask)
    calls = answer.choices[0].message.tool_calls or []
    return [ToolCall(call.function.name, json.loads(call.function.arguments)) for call in calls]


async def openai_responses(url: str, model: str, stream: bool) -> list[ToolCall]:
    """OpenAI's SDK: responses."""
    from openai import AsyncOpenAI

    ask: dict[str, Any] = {
        "model": model, "input": QUESTION, "tools": [{"type": "function", **TOOL["function"], "strict": False}],
        "tool_choice": {"type": "function", "name": NAME}, "max_output_tokens": MAX_TOKENS, "temperature": 0,
        "store": False,
    }  # fmt: skip
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=TIMEOUT_S) as client:
        if stream:
            async with client.responses.stream(**ask) as events:
                answer = await events.get_final_response()
        else:
            answer = await client.responses.create(**ask)
    calls = [item for item in answer.output if item.type == "function_call"]
    return [ToolCall(call.name, json.loads(call.arguments)) for call in calls]


async def anthropic_sdk(url: str, model: str, stream: bool) -> list[ToolCall]:
    """Anthropic's SDK."""
    from anthropic import AsyncAnthropic

    ask: dict[str, Any] = {
        "model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": MAX_TOKENS,
        "tools": [{"name": NAME, "description": DESCRIPTION, "input_schema": PARAMETERS}],
        "tool_choice": {"type": "tool", "name": NAME}, "extra_body": {"temperature": 0},
    }  # fmt: skip
    async with AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0, timeout=TIMEOUT_S) as client:
        if stream:
            async with client.messages.stream(**ask) as events:
                answer = await events.get_final_message()
        else:
            answer = await client.messages.create(**ask)
    return [ToolCall(block.name, block.input) for block in answer.content if block.type == "tool_use"]


async def langchain(url: str, model: str, stream: bool) -> list[ToolCall]:
    """LangChain's ChatOpenAI."""
    from langchain_openai import ChatOpenAI

    chat: Any = ChatOpenAI(
        model=model, base_url=f"{url}/v1", api_key=KEY, temperature=0, max_tokens=MAX_TOKENS, max_retries=0,
        timeout=TIMEOUT_S,
    ).bind_tools([TOOL], tool_choice=NAME)  # fmt: skip
    answer: Any = None
    if stream:
        async for piece in chat.astream(QUESTION):
            answer = piece if answer is None else answer + piece
    else:
        answer = await chat.ainvoke(QUESTION)
    return [ToolCall(call["name"], call["args"]) for call in answer.tool_calls]


async def litellm(url: str, model: str, stream: bool) -> list[ToolCall]:
    """LiteLLM, as a library: its proxy makes the same calls."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else the import reads a list of prices from the network
    import litellm

    litellm.suppress_debug_info = True
    ask: dict[str, Any] = {
        "model": f"openai/{model}", "messages": [{"role": "user", "content": QUESTION}], "tools": [TOOL],
        "tool_choice": CHOICE, "max_tokens": MAX_TOKENS, "temperature": 0, "api_base": f"{url}/v1", "api_key": KEY,
        "num_retries": 0, "timeout": TIMEOUT_S,
    }  # fmt: skip
    if stream:
        pieces = [piece async for piece in await litellm.acompletion(**ask, stream=True)]
        answer: Any = litellm.stream_chunk_builder(pieces)
    else:
        answer = await litellm.acompletion(**ask)
    calls = answer.choices[0].message.tool_calls or []
    return [ToolCall(call.function.name, json.loads(call.function.arguments)) for call in calls]


async def pydantic_ai(url: str, model: str, stream: bool) -> list[ToolCall]:
    """pydantic-ai: the model's answer must be a call of the output's tool."""
    from openai import AsyncOpenAI
    from pydantic_ai.direct import model_request, model_request_stream
    from pydantic_ai.messages import ModelRequest, ToolCallPart
    from pydantic_ai.models import ModelRequestParameters
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.settings import ModelSettings
    from pydantic_ai.tools import ToolDefinition

    tool = ToolDefinition(name=NAME, description=DESCRIPTION, parameters_json_schema=PARAMETERS, kind="output")
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=TIMEOUT_S) as client:
        asked = OpenAIChatModel(model, provider=OpenAIProvider(openai_client=client))
        more: dict[str, Any] = {
            "model_settings": ModelSettings(max_tokens=MAX_TOKENS, temperature=0, parallel_tool_calls=False),
            "model_request_parameters": ModelRequestParameters(
                output_tools=[tool], output_mode="tool", allow_text_output=False
            ),
        }
        messages: list[Any] = [ModelRequest.user_text_prompt(QUESTION)]
        if stream:
            async with model_request_stream(asked, messages, **more) as events:
                async for _ in events:
                    pass
                answer = events.get()
        else:
            answer = await model_request(asked, messages, **more)
    return [ToolCall(part.tool_name, part.args_as_dict()) for part in answer.parts if isinstance(part, ToolCallPart)]


async def openai_agents(url: str, model: str, stream: bool) -> list[ToolCall]:
    """OpenAI's Agents SDK, which runs the tool itself."""
    from agents import Agent, FunctionTool, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    found: list[ToolCall] = []

    async def run_tool(_context: Any, arguments: str) -> str:
        found.append(ToolCall(NAME, json.loads(arguments)))
        return "dry"

    tool = FunctionTool(
        name=NAME, description=DESCRIPTION, params_json_schema=PARAMETERS, on_invoke_tool=run_tool,
        strict_json_schema=False,
    )  # fmt: skip
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=TIMEOUT_S) as client:
        agent = Agent(
            name="asker", tools=[tool], tool_use_behavior="stop_on_first_tool",
            model=OpenAIChatCompletionsModel(model=model, openai_client=client),
            model_settings=ModelSettings(tool_choice=NAME, max_tokens=MAX_TOKENS, temperature=0),
        )  # fmt: skip
        if stream:
            running = Runner.run_streamed(agent, QUESTION)
            async for _ in running.stream_events():
                pass
        else:
            await Runner.run(agent, QUESTION)
    return found


AI_SDK = Path(__file__).with_name("ai_sdk")


async def ai_sdk(url: str, model: str, stream: bool) -> list[ToolCall]:
    """Vercel's AI SDK, in Node.js."""
    given = {
        "question": QUESTION, "name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS,
        "maxTokens": MAX_TOKENS,
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        "node", "ask.mjs", url, model, str(stream).lower(), json.dumps(given),
        cwd=AI_SDK, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-2000:]
    return [ToolCall(name, arguments) for name, arguments in json.loads(output)]


# By the name of the module that each needs.
CLIENTS: Mapping[str, Client] = {
    "openai": openai_sdk,
    "openai.responses": openai_responses,
    "anthropic": anthropic_sdk,
    "langchain_openai": langchain,
    "litellm": litellm,
    "pydantic_ai": pydantic_ai,
    "agents": openai_agents,
    "ai": ai_sdk,
}


def reason_missing(module: str) -> str:
    """Why this client cannot be tested here; empty if it can."""
    if module == "ai":
        has_packages = (AI_SDK / "node_modules").is_dir() and shutil.which("node") is not None
        return "" if has_packages else f"needs Node.js, and npm install in {AI_SDK.name}"
    found = importlib.util.find_spec(module.partition(".")[0])
    return "" if found is not None else "needs pip install -e '.[clients]'"
