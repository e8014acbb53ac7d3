"""SGLang's log-probabilities, made of those of a vLLM completion: a triple [logprob, token id, text or null] a token.

Token ids are exact: a completion is asked for `return_token_ids`, and names the likeliest tokens as `token_id:N`.

Source: SGLang 0.5 managers/tokenizer_manager.py (convert_logprob_style), managers/io_struct.py; vLLM 0.32
entrypoints/openai/completion/serving.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.core.errors import BadBody
from router.protocols.bodies import per_item

Triple = list[Any]
_WANTED, _START, _TOP, _WITH_TEXT = FIELDS = (
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
)
_ID_MARK = "token_id:"


@dataclass(frozen=True, slots=True)
class LogprobsRequest:
    """The log-probabilities that a client wants of one text.

    start      first token of the prompt that has one in the answer; -1: none of the prompt
    top        how many of the likeliest tokens at each place; 0: none
    with_text  whether each token's text is in its triple
    """

    start: int = -1
    top: int = 0
    with_text: bool = False

    def completion_fields(self) -> dict[str, Any]:
        """The fields of a vLLM completion whose answer has these log-probabilities."""
        fields: dict[str, Any] = {"logprobs": self.top}
        if not self.with_text:
            fields["return_tokens_as_token_ids"] = True
        if self.start >= 0:
            fields["prompt_logprobs"] = self.top
        return fields

    def native_fields(self) -> dict[str, Any]:
        """The fields of SGLang's own call."""
        values = (True, self.start, self.top, self.with_text)
        return dict(zip(FIELDS, values, strict=True))


def check_for_completions(native: Mapping[str, Any], dialect: str) -> None:
    """Raise BadBody for log-probabilities that no completion of this kind of engine has.

    native   one item in SGLang's own form
    dialect  the engine's; of the kinds that are known only vLLM 0.32 names token ids
    """
    if not native.get(_WANTED):
        return
    if dialect != "vllm":
        message = f"this adapter is served by {dialect}, whose completions have no token ids; there are vLLM and SGLang"
        raise BadBody(f"{_WANTED}: {message}", param=_WANTED)
    if native[_WITH_TEXT] and native[_TOP]:
        message = f"with {_TOP} vLLM says texts or token ids, and not both; leave one of the two out"
        raise BadBody(f"{_WITH_TEXT}: {message}", param=_WITH_TEXT)
    if native[_START] >= 0 and native["stream"]:
        message = "vLLM gives no log-probabilities of the prompt in a stream; leave out one of the two"
        raise BadBody(f"{_START}: {message}", param=_START)


def logprobs_requests(body_fields: Mapping[str, Any], count: int, *, is_list: bool) -> list[LogprobsRequest | None]:
    """What each text of a call wants; None: no log-probabilities. Raises BadBody naming the field that is wrong."""
    columns = [
        per_item(name, body_fields.get(name), count, is_list=is_list, kind=kind)
        for name, kind in zip(FIELDS[:3], (bool, int, int), strict=True)
    ]
    with_text = body_fields.get(_WITH_TEXT)
    if not isinstance(with_text, bool | None):
        raise BadBody(f"{_WITH_TEXT} must be true or false, found {with_text!r}", param=_WITH_TEXT)
    found: list[LogprobsRequest | None] = []
    for wanted, start, top in zip(*columns, strict=True):
        if not wanted:
            found.append(None)
            continue
        if (top or 0) < 0:
            raise BadBody(f"{_TOP} must be 0 or more, found {top}", param=_TOP)
        found.append(LogprobsRequest(-1 if start is None else start, top or 0, bool(with_text)))
    return found


def output_logprobs(choice: Mapping[str, Any], ids: Sequence[int], wanted: LogprobsRequest) -> dict[str, Any]:
    """The fields of `meta_info` about the answer's tokens, of one choice or chunk; `ids`: of its tokens."""
    found = choice["logprobs"] or {"token_logprobs": [], "tokens": [], "top_logprobs": []}
    texts = found["tokens"] if wanted.with_text else [None] * len(ids)
    triples = [list(row) for row in zip(found["token_logprobs"], ids, texts, strict=True)]
    fields: dict[str, Any] = {"output_token_logprobs": triples}
    if wanted.top:
        fields["output_top_logprobs"] = [_likeliest_tokens(place or {}, wanted.top) for place in found["top_logprobs"]]
    return fields


def input_logprobs(choice: Mapping[str, Any], wanted: LogprobsRequest) -> dict[str, Any]:
    """The fields of `meta_info` about the prompt's tokens, of one choice. As in SGLang the first has no number."""
    fields: dict[str, Any] = {"input_token_logprobs": []}
    if wanted.top:
        fields["input_top_logprobs"] = []
    places = choice.get("prompt_logprobs")
    if wanted.start < 0 or places is None:
        return fields
    ids = choice["prompt_token_ids"]
    for at in range(wanted.start, len(ids)):
        place = (places[at] or {}) if at > wanted.start else {}
        own = place.get(str(ids[at])) or {}
        text = own.get("decoded_token") if wanted.with_text else None
        fields["input_token_logprobs"].append([own.get("logprob"), ids[at], text])
        if wanted.top:
            values = {_ID_MARK + token: entry["logprob"] for token, entry in place.items()}
            fields["input_top_logprobs"].append(_likeliest_tokens(values, wanted.top) if values else None)
    return fields


def _likeliest_tokens(place: Mapping[str, float], count: int) -> list[Triple]:
    """The likeliest tokens at one place, best first. vLLM adds the sampled one where it is not among them."""
    best = sorted(place.items(), key=lambda entry: -entry[1])[:count]
    return [[value, int(token.removeprefix(_ID_MARK)), None] for token, value in best]
