"""LangChain: chats, a tool, a stream, structured output and embeddings, by its OpenAI and Anthropic integrations."""

import os
from importlib.metadata import version

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

url, model = os.environ["STUB"], os.environ["MODEL"]
print("version", version("langchain-openai"))


@tool
def read_note(name: str) -> str:
    """Read a note."""
    return "The key is under the mat."


class Place(BaseModel):
    """Where something is."""

    where: str


common = {"model": model, "max_retries": 0, "max_tokens": 16}
for chat in (
    ChatOpenAI(base_url=f"{url}/v1", api_key="key-of-nobody", **common),
    ChatOpenAI(base_url=f"{url}/v1", api_key="key-of-nobody", use_responses_api=True, **common),
    ChatAnthropic(base_url=url, api_key="key-of-nobody", **common),
):
    messages = [SystemMessage("Be brief."), HumanMessage("Where is the key?")]
    answer = chat.bind_tools([read_note]).invoke(messages)
    for call in answer.tool_calls:
        messages += [answer, ToolMessage(read_note.invoke(call["args"]), tool_call_id=call["id"])]
    chat.bind_tools([read_note]).invoke(messages)
    list(chat.stream("Where is the key?"))
try:
    ChatOpenAI(base_url=f"{url}/v1", api_key="key-of-nobody", **common).with_structured_output(Place).invoke("Where?")
except ValueError as exc:  # the stub's text is no such object
    print(type(exc).__name__)
OpenAIEmbeddings(
    base_url=f"{url}/v1", api_key="key-of-nobody", model=model, check_embedding_ctx_length=False
).embed_query("x")
