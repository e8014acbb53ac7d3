"""lm-evaluation-harness: log-likelihoods and generations, with vLLM's tokenizer by HTTP, and chats."""

import os
from importlib.metadata import version

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

url, model = os.environ["STUB"], os.environ["MODEL"]
print("version", version("lm-eval"))


def instances(kind, *arguments):
    return [Instance(request_type=kind, doc={}, arguments=each, idx=at) for at, each in enumerate(arguments)]


completions = LocalCompletionsAPI(
    base_url=f"{url}/v1/completions",
    model=model,
    tokenizer_backend="remote",
    max_retries=1,
    batch_size=2,
    max_length=512,
)
completions.loglikelihood(instances("loglikelihood", ("The key is", " under"), ("The key is", " lost")))
until = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
completions.generate_until(instances("generate_until", ("Where is the key?", until)))
chats = LocalChatCompletion(base_url=f"{url}/v1/chat/completions", model=model, max_retries=1)
prompt = chats.apply_chat_template([{"role": "user", "content": "Where is the key?"}])
chats.generate_until(instances("generate_until", (prompt, until)))
