"""Request bodies to values: what `/v1/completions` and `/v1/chat/completions` were asked for."""

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal
from uuid import uuid4

from attrs import evolve, field, frozen

from kvflow.engine.api import MAX_LOGPROBS, SEED_BOUND, Request, SamplingParams
from kvflow.server import unsupported
from kvflow.server.errors import ApiError, bad_request
from kvflow.server.fields import Fields, is_int, refuse
from kvflow.server.messages import read_messages
from kvflow.server.template import TemplateError
from kvflow.server.tokenizer import TextTokenizer, TokenizerError

Endpoint = Literal["completions", "chat"]

MAX_STOPS = 4
DEFAULT_COMPLETION_TOKENS = 16


@frozen
class Model:
    """The facts about the served model that requests are checked against."""

    name: str
    max_model_len: int
    tokenizer: TextTokenizer
    max_choices: int = 128


@frozen
class Choice:
    """One sequence that a call asks for. Choice `index` continues prompt `prompt_idx`."""

    index: int
    prompt_idx: int
    request: Request
    echo: str = ""


def _choices(values: Iterable[Choice]) -> tuple[Choice, ...]:
    return tuple(values)


@frozen
class Call:
    """One HTTP request, understood. `created` is in seconds since the epoch."""

    endpoint: Endpoint
    call_id: str
    created: int
    model: str
    choices: tuple[Choice, ...] = field(converter=_choices)
    stops: tuple[str, ...]
    skip_special: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    wants_logprobs: bool
    wants_report: bool


def read_completion(fields: Fields, model: Model) -> Call:
    """A `/v1/completions` body; raises `ApiError` (400, 404) or `InvalidRequest`."""
    unsupported.check_supported(fields, unsupported.COMPLETIONS)
    num_logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    echo = fields.boolean("echo", False)
    if echo and num_logprobs is not None:
        raise bad_request("echo", "echo with logprobs is not supported", "unsupported_parameter")
    prompts, texts = _read_prompts(fields, model.tokenizer)
    default = DEFAULT_COMPLETION_TOKENS
    sampling = [_sampling(fields, model, len(p), default, num_logprobs) for p in prompts]
    return _call("completions", fields, model, prompts, sampling, texts if echo else None)


def read_chat(fields: Fields, model: Model) -> Call:
    """A `/v1/chat/completions` body; raises `ApiError` (400, 404) or `InvalidRequest`."""
    unsupported.check_supported(fields, unsupported.CHAT)
    wanted = fields.boolean("logprobs", False)
    num_top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if num_top and not wanted:
        raise bad_request("top_logprobs", f"top_logprobs is {num_top}, but logprobs is not true")
    prompt = model.tokenizer.encode(chat_text(fields, model.tokenizer), add_special_tokens=False)
    if not prompt:
        raise bad_request("messages", "the chat template made an empty prompt of these messages")
    sampling = _sampling(fields, model, len(prompt), None, (num_top or 0) if wanted else None)
    return _call("chat", fields, model, [prompt], [sampling], None)


def chat_text(fields: Fields, tokenizer: TextTokenizer) -> str:
    """The prompt that the model's chat template makes of a body's messages."""
    messages = read_messages(fields)
    extra = fields.object("chat_template_kwargs")
    variables: Mapping[str, Any] = {
        "tools": None,
        "documents": None,
        "reasoning_effort": fields.string("reasoning_effort"),
        "add_generation_prompt": fields.boolean("add_generation_prompt", True),
        **(extra.values if extra else {}),
    }
    given = {name: v for name, v in variables.items() if name != "reasoning_effort" or v}
    try:
        return tokenizer.render_chat(messages, given)
    except (TemplateError, TokenizerError) as error:
        raise bad_request("messages", str(error)) from error


READERS: Mapping[Endpoint, Callable[[Fields, Model], Call]] = {
    "completions": read_completion,
    "chat": read_chat,
}
"""What reads the body of a call."""


def check_model(fields: Fields, name: str) -> None:
    """404 for a model that is not served; an absent field means the one that is."""
    asked = fields.string("model")
    if asked is not None and asked != name:
        message = f"the model {asked!r} does not exist; this server has {name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def _call(
    endpoint: Endpoint,
    fields: Fields,
    model: Model,
    prompts: list[tuple[int, ...]],
    sampling: list[SamplingParams],
    echoes: list[str] | None,
) -> Call:
    num_samples = fields.integer("n", 1, model.max_choices) or 1
    total = num_samples * len(prompts)
    if total > model.max_choices:
        message = f"{len(prompts)} prompts x n {num_samples} = {total} choices"
        raise bad_request("n", f"{message}, but at most {model.max_choices} are served")
    seed = fields.integer("seed", -SEED_BOUND, SEED_BOUND - 1)
    prefix = "cmpl" if endpoint == "completions" else "chatcmpl"
    call_id = f"{prefix}-{uuid4().hex}"
    choices = []
    for index in range(total):
        prompt_idx, sample_idx = divmod(index, num_samples)
        own = secrets.randbelow(SEED_BOUND) if seed is None else (seed + sample_idx) % SEED_BOUND
        request = Request(
            f"{call_id}-{index}",
            prompts[prompt_idx],
            evolve(sampling[prompt_idx], seed=own),
            fields.string("cache_salt"),
        )
        choices.append(Choice(index, prompt_idx, request, echoes[prompt_idx] if echoes else ""))
    stream = fields.boolean("stream", False)
    include_usage, continuous_usage = _stream_options(fields, stream)
    return Call(
        endpoint=endpoint,
        call_id=call_id,
        created=int(time.time()),
        model=model.name,
        choices=choices,
        stops=_read_stops(fields),
        skip_special=fields.boolean("skip_special_tokens", True),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        wants_logprobs=sampling[0].num_logprobs is not None,
        wants_report=fields.boolean("kvflow_report", False),
    )


def _sampling(
    fields: Fields, model: Model, prompt_len: int, default: int | None, num_logprobs: int | None
) -> SamplingParams:
    """Sampling without its seed. The rule: prompt tokens + max_tokens <= max_model_len."""
    limit = model.max_model_len
    newer = fields.integer("max_completion_tokens", 1, 2**62)
    older = fields.integer("max_tokens", 1, 2**62)
    name = "max_tokens" if newer is None else "max_completion_tokens"
    asked = newer or older
    room = limit - prompt_len
    max_tokens = asked or max(1, room if default is None else min(default, room))
    if max_tokens > room:
        text = "messages" if default is None else "prompt"
        raise bad_request(
            text if asked is None or room < 1 else name,
            f"the prompt has {prompt_len} tokens and {name} is {max_tokens}: prompt tokens + "
            f"max_tokens = {prompt_len + max_tokens}, but must be at most {limit} (max_model_len)",
            code="context_length_exceeded",
        )
    stop_ids = fields.get("stop_token_ids")
    stop_ids = [] if stop_ids is None else stop_ids
    if not isinstance(stop_ids, list) or not all(map(is_int, stop_ids)):
        raise refuse("stop_token_ids", stop_ids, "a list of token ids")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=fields.number("temperature", 1.0),
        top_p=fields.number("top_p", 1.0),
        stop_token_ids=stop_ids,
        ignore_eos=fields.boolean("ignore_eos", False),
        num_logprobs=num_logprobs,
    )


def _read_prompts(
    fields: Fields, tokenizer: TextTokenizer
) -> tuple[list[tuple[int, ...]], list[str]]:
    """Token ids of every prompt, and the text of every prompt."""
    prompt = fields.get("prompt")
    single = isinstance(prompt, str) or (isinstance(prompt, list) and all(map(is_int, prompt)))
    items = [prompt] if single and prompt != [] else prompt
    if not isinstance(items, list) or not items:
        raise refuse("prompt", prompt, "text, token ids, or a non-empty list of these")
    add_special_tokens = fields.boolean("add_special_tokens", True)
    prompts: list[tuple[int, ...]] = []
    texts: list[str] = []
    for idx, item in enumerate(items):
        where = "prompt" if single else f"prompt[{idx}]"
        if isinstance(item, str):
            tokens, text = tokenizer.encode(item, add_special_tokens=add_special_tokens), item
        else:
            tokens = _read_token_ids(item, where, tokenizer.vocab_size)
            text = tokenizer.decode(tokens)
        if not tokens:
            raise bad_request("prompt", f"{where} has 0 tokens, but must have at least 1")
        prompts.append(tokens)
        texts.append(text)
    return prompts, texts


def _read_token_ids(item: Any, where: str, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(item, list) or not all(map(is_int, item)):
        raise bad_request("prompt", f"{where} is neither text nor a list of token ids")
    wrong = next((token for token in item if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise bad_request("prompt", f"{where} has token id {wrong}, outside [0, {vocab_size})")
    return tuple(item)


def _read_stops(fields: Fields) -> tuple[str, ...]:
    stop = fields.get("stop")
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise refuse("stop", stop, f"a string or a list of at most {MAX_STOPS} strings")
    if not all(isinstance(s, str) and s for s in stops):
        raise refuse("stop", stop, "made of non-empty strings")
    return tuple(stops)


def _stream_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    options = fields.object("stream_options")
    if options is None:
        return False, False
    if not stream:
        raise bad_request("stream_options", "stream_options is given, but stream is not true")
    include_usage = options.boolean("include_usage", False)
    return include_usage, include_usage and options.boolean("continuous_usage_stats", False)
