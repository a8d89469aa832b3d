"""Lenience about fields that no reply depends on: clients send them, and they are left out unread.

A field is refused only where leaving it out would change the answer that the user expects.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, Final, get_args

from pydantic import BaseModel, ConfigDict, model_validator

from penstock.server.http.errors import check_unicode


class Anything:
    """A set that contains every value."""

    def __contains__(self, value: object) -> bool:
        return True


ANYTHING: Final = Anything()
Unread = Mapping[str, Collection[Any] | Anything]
"""Fields that are not read, with their values that change nothing; other values are refused."""

EVERYWHERE: Final[Unread] = {
    "cache_control": ANYTHING,  # Anthropic's hint, which LiteLLM and LangChain pass on
    "provider_specific_fields": ANYTHING,  # LiteLLM's own notes on a reply
    "prompt_cache_breakpoint": ANYTHING,
}
OF_GENERATION: Final[Unread] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "cache_prompt": ANYTHING,
    "cache_salt": ANYTHING,
    "continue_final_message": (False,),
    "detokenize": (True,),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "guided_decoding_backend": ANYTHING,
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "max_tool_calls": ANYTHING,  # counts calls of tools that a server runs itself
    "modalities": (["text"],),
    "prompt_logprobs": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
}
"""Parameters of OpenAI's or vLLM's API that this one lacks, with their default values."""

REASONS: Final = {
    "audio": "asks for sound, and the model here writes text: remove it",
    "chat_template": "would have a request bring a program of its own: give the server one with --chat-template",
    "function_call": "is the older form of tool_choice: send tools and tool_choice",
    "functions": "is the older form of tools: send tools",
    "modalities": 'asks for other than text, and the model here writes text: remove it, or send ["text"]',
    "prompt_logprobs": "asks for what is not computed here: a prompt's tokens have no log-probabilities; remove it",
    "suffix": "asks for text to be inserted, and the model here continues it: remove it",
    "use_beam_search": "asks for a search that is not built here: remove it",
    "web_search_options": "asks for a web search, and there is none here: remove it",
}
"""Reasons for refusing fields of other servers, by the field."""


def says_nothing(name: str, value: Any, unread: Unread) -> bool:
    """Whether a field that is not read here may be left out with this value."""
    if name == "web_search_options":
        return value is None  # even an empty one asks for a search in OpenAI's API
    if value is None or (isinstance(value, str | list | dict) and not value):
        return True
    return value in unread.get(name, ()) or value in EVERYWHERE.get(name, ())


def whole(value: Any) -> Any:
    if isinstance(value, list):
        return [whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_integer(annotation: Any) -> bool:
    """Whether a field of this type takes integers, or lists of them, and no other numbers."""
    kinds = set(leaves(annotation))
    return int in kinds and float not in kinds


def leaves(annotation: Any) -> Iterator[Any]:
    """The types that a union or a list is made of in the end."""
    if parts := get_args(annotation):
        for part in parts:
            yield from leaves(part)
    else:
        yield annotation


@cache
def integers_of(model: type[BaseModel]) -> frozenset[str]:
    """The names of a request's fields that are integers."""
    fields = model.model_fields.items()
    return frozenset(field.alias or name for name, field in fields if is_integer(field.annotation))


class ApiModel(BaseModel):
    """A part of a request. It is strict, but fields without effect are left out before validation.

    Left out are nulls of fields that have a default, and unread fields for which ``says_nothing`` holds. JSON knows one
    kind of number: where a field is an integer, 1.0 is 1.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)
    unread: ClassVar[Unread] = {}

    @model_validator(mode="before")
    @classmethod
    def leave_out_what_says_nothing(cls, given: Any) -> Any:
        check_unicode(given)
        if not isinstance(given, dict):
            return given
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        integers = integers_of(cls)
        return {
            name: whole(value) if name in integers else value
            for name, value in given.items()
            if (
                value is not None or fields[name].is_required()
                if name in fields
                else not says_nothing(name, value, cls.unread)
            )
        }
