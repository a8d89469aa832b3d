"""Turns a user's sampling parameters into what the stages need, and refuses those that the model cannot serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core import RequestError, SamplingParams
from penstock.messages import Sampling

if TYPE_CHECKING:
    from penstock.models.checkpoint import Checkpoint
    from penstock.text.tokenizer import Tokenizer


def ends_of(params: SamplingParams, checkpoint: Checkpoint) -> frozenset[int]:
    """Token ids at which a request ends."""
    own = () if params.ignore_eos else checkpoint.eos_token_ids
    return frozenset(params.stop_token_ids) | frozenset(own)


def sampling_of(params: SamplingParams, seed: int, sample: int, ends: frozenset[int], prompt_length: int) -> Sampling:
    return Sampling(
        seed=seed,
        sample=sample,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        min_p=params.min_p,
        logprobs=-1 if params.logprobs is None else params.logprobs,
        barred=tuple(sorted(ends)) if params.min_tokens else (),
        barred_before=prompt_length + params.min_tokens if params.min_tokens else 0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=tuple(sorted((params.logit_bias or {}).items())),
        allowed_token_ids=tuple(params.allowed_token_ids or ()),
        grammar=grammar_text(params),
        prompt_length=prompt_length,
    )


def grammar_text(params: SamplingParams) -> str:
    if params.structured_outputs is None:
        return ""
    from penstock.text.grammar import grammar_of

    return grammar_of(params.structured_outputs)


def check_sampling(params: SamplingParams, checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> None:
    """Raise RequestError, naming the field, for parameters that this model cannot serve.

    A new grammar is compiled by a worker, within limits on time and memory.
    """
    for name in ("logit_bias", "allowed_token_ids"):
        beyond = [token for token in getattr(params, name) or () if token >= checkpoint.vocab_size]
        if beyond:
            last = checkpoint.vocab_size - 1
            raise RequestError(f"{name} holds {beyond[0]}; the model's token ids are 0 to {last}")
    if params.structured_outputs is None:
        return
    if tokenizer is None:
        raise RequestError("structured_outputs needs a tokenizer; leave out skip_tokenizer_init=True")
    if not checkpoint.eos_token_ids:
        raise RequestError("structured_outputs: the checkpoint names no EOS token, so no output could end")
    from penstock.text.grammar import check_grammar

    check_grammar(params.structured_outputs, tokenizer, checkpoint.vocab_size, checkpoint.eos_token_ids)
