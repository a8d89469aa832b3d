"""What a generation cost and how it went, as the replies, the metrics and the log tell it."""

from __future__ import annotations

from penstock.core import SpeculationMetrics
from penstock.server.openai.generation import Generation
from penstock.server.openai.protocol import CompletionDetails, Metrics, PromptDetails, Usage


def usage_of(generation: Generation) -> Usage:
    outputs = generation.outputs()
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = completion_tokens(generation)
    speculation = speculation_of(generation)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptDetails(cached_tokens=sum(output.num_cached_tokens for output in outputs)),
        completion_tokens_details=CompletionDetails(
            accepted_prediction_tokens=speculation.accepted,
            rejected_prediction_tokens=speculation.drafted_nodes - speculation.accepted,
        ),
    )


def metrics_of(generation: Generation) -> Metrics:
    speculation = speculation_of(generation)
    first, last, tokens = generation.first_token_at, generation.last_token_at, completion_tokens(generation)
    decoding = last - first if first is not None and last is not None else 0.0
    return Metrics(
        time_to_first_token=None if first is None else round(first - generation.began, 6),
        seconds=round((last or generation.began) - generation.began, 6),
        tokens_per_second=round((tokens - 1) / decoding, 3) if decoding > 0 else None,
        mean_acceptance_length=speculation.mean_acceptance_length,
        num_drafts=speculation.drafts,
        num_draft_tokens=speculation.drafted_nodes,
        num_accepted_tokens=speculation.accepted,
    )


def completion_tokens(generation: Generation) -> int:
    return sum(len(choice.token_ids) for output in generation.outputs() for choice in output.outputs)


def speculation_of(generation: Generation) -> SpeculationMetrics:
    """The sum over all choices."""
    found = [choice.metrics for output in generation.outputs() for choice in output.outputs]
    return SpeculationMetrics(
        drafts=sum(one.drafts for one in found),
        accepted=sum(one.accepted for one in found),
        misses=sum(one.misses for one in found),
        drafted_nodes=sum(one.drafted_nodes for one in found),
        rows_entered=sum(one.rows_entered for one in found),
        rows_dead=sum(one.rows_dead for one in found),
    )
