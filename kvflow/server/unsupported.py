"""Fields that OpenAI or vLLM users know and this server does not carry out.

Each is accepted with a value that asks for nothing and refused by name otherwise: a server that
ignores a wish gives a wrong answer that looks right.
"""

from collections.abc import Mapping
from typing import Any

from kvflow.server.errors import bad_request
from kvflow.server.fields import Fields, shown

_EVERYWHERE: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "frequency_penalty": (0,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "structured_outputs": (),
    "top_k": (0, -1),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
COMPLETIONS: Mapping[str, tuple[Any, ...]] = {**_EVERYWHERE, "best_of": (1,), "suffix": ("",)}
CHAT: Mapping[str, tuple[Any, ...]] = {
    **_EVERYWHERE,
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}


def check_supported(fields: Fields, table: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise 400 for the first field of `table` that asks for something."""
    for name, neutral in table.items():
        value = fields.get(name)
        if value is None or any(_same(value, one) for one in neutral):
            continue
        allowed = " or ".join([repr(n) for n in neutral] + ["absent"])
        message = f"{name} is not supported: it is {shown(value)}, but must be {allowed}"
        raise bad_request(name, message, code="unsupported_parameter")


def _same(value: object, neutral: object) -> bool:
    """In JSON, where true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
