"""Requests that begin with tokens of an earlier run: checks of what came, and where the answer stands after it.

Noise is keyed by seed and position, and penalties, grammars and stops are functions of the tokens alone. An answer that
was cut off therefore goes on with the tokens that it would have had, here or on another engine with the same model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

from penstock.core import FinishReason, RequestError, SamplingParams
from penstock.engine.completion import Completion
from penstock.engine.job import token_ids_of
from penstock.requests.request import Request
from penstock.text.tokenizer import Tokenizer


def resumed_ids(given: Any, params: SamplingParams, vocabulary: int) -> list[list[int]]:
    """The tokens that each of the ``n`` completions begins with, as Python's own integers.

    Raises RequestError, naming the completion, for tokens that the request cannot have brought.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise RequestError(f"resumed is {given!r}; it has to be a list of token ids for each completion")
    lists = list(given)
    if len(lists) != params.n:
        raise RequestError(f"resumed has {len(lists)} lists of token ids for n = {params.n} completions")
    found = [
        token_ids_of(one, vocabulary, f"resumed[{index}]", f"resumed[{index}]: a token id")
        for index, one in enumerate(lists)
    ]
    for index, ids in enumerate(found):
        _check_possible(f"resumed[{index}]", ids, params)
    if any(found) and params.temperature > 0 and params.seed is None:
        raise RequestError(
            "seed is not given; with resumed tokens of a sampled answer it has to be that of its beginning"
        )
    return found


def _check_possible(name: str, ids: list[int], params: SamplingParams) -> None:
    if len(ids) > params.max_tokens:
        raise RequestError(f"{name} holds {len(ids)} tokens; max_tokens is {params.max_tokens}")
    if params.allowed_token_ids is not None:
        allowed = set(params.allowed_token_ids)
        other = next((token for token in ids if token not in allowed), None)
        if other is not None:
            raise RequestError(f"{name} holds {other}, which is not among allowed_token_ids")


def check_structure(
    resumed: Sequence[Sequence[int]], params: SamplingParams, tokenizer: Tokenizer, vocabulary: int, ends: Sequence[int]
) -> None:
    """Raise RequestError unless the structure of the output allows these tokens. A worker reads them, within limits.

    ``ends`` are the checkpoint's EOS tokens, behind which a structured output has nothing but them.
    """
    from penstock.text.grammar import check_output

    assert params.structured_outputs is not None
    for index, ids in enumerate(resumed):
        text = list(takewhile(lambda token: token not in ends, ids))
        after = ids[len(text) :]
        if any(token not in ends for token in after):
            problem = "it goes on after its end"
        elif ids:
            problem = check_output(params.structured_outputs, tokenizer, vocabulary, ends, text, ended=bool(after))
        else:
            problem = ""
        if problem:
            raise RequestError(f"resumed[{index}] is not what structured_outputs allows: {problem}")


def resume(request: Request, completion: Completion, at: float) -> None:
    """Have ``completion`` begin with the tokens that ``request`` was made with; its reader has them and their text.

    A completion that ended with them is over, and its end is told again without tokens or text. ``at`` is the moment of
    submission in seconds. Raises RequestError where the tokens go on after an end.
    """
    ids, name = request.tokens[len(request.prompt) :], f"resumed[{completion.output.index}]"
    if not ids:
        return
    early = next((place for place, token in enumerate(ids[:-1]) if token in request.stop_ids), None)
    if early is not None:
        raise RequestError(f"{name} goes on after token {ids[early]} at place {early}, which ends the output")
    stopped = completion.resume(ids)
    if stopped is not None and stopped < len(ids) - 1:
        raise RequestError(f"{name} goes on after a stop string, which ends the output at place {stopped}")
    reason = FinishReason.STOP if stopped is not None else request.end_of(ids[-1])
    if reason is not None:
        request.finished = reason
        completion.finish(reason, at)
    completion.mark_taken()
