"""The cost and timing of a generation: summed up once, reported by replies, metrics and the log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from penstock.core import FinishReason, OutlineOutput, RequestOutput, SpeculationMetrics
from penstock.server.openai.protocol import CompletionDetails, Metrics, PromptDetails, Usage


@dataclass(frozen=True)
class Summary:
    """The sums over all choices of all prompts.

    Seconds count from the request's arrival in the engine to its first and its last token; None while there is none.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish_reasons: list[FinishReason | None]
    speculation: SpeculationMetrics
    first_token_seconds: float | None
    last_token_seconds: float | None
    outline: OutlineOutput | None = None
    """How an answer in points came about. Prompts and tokens of the points' own requests are in the sums."""

    @property
    def decoding_seconds(self) -> float:
        """Seconds from the first token to the last."""
        if self.first_token_seconds is None or self.last_token_seconds is None:
            return 0.0
        return self.last_token_seconds - self.first_token_seconds


def summarize(
    outputs: Sequence[RequestOutput], first_token_seconds: float | None, last_token_seconds: float | None
) -> Summary:
    computed = [request for output in outputs for request in requests_of(output)]
    choices = [choice for request in computed for choice in request.outputs]
    names = [field.name for field in fields(SpeculationMetrics)]
    return Summary(
        prompt_tokens=sum(len(request.prompt_token_ids) for request in computed),
        cached_tokens=sum(request.num_cached_tokens for request in computed),
        completion_tokens=sum(len(choice.token_ids) for choice in choices),
        finish_reasons=[choice.finish_reason for output in outputs for choice in output.outputs],
        speculation=SpeculationMetrics(*(sum(getattr(choice.metrics, name) for choice in choices) for name in names)),
        first_token_seconds=first_token_seconds,
        last_token_seconds=last_token_seconds,
        outline=outputs[0].outline if outputs else None,
    )


def requests_of(output: RequestOutput) -> list[RequestOutput]:
    """The requests that the engine has computed for an answer: itself, or those behind an answer in points."""
    outline = output.outline
    if outline is None:
        return [output]
    return [*outline.guides, *(outline.points if outline.used else [output])]


def usage_of(summary: Summary) -> Usage:
    speculation = summary.speculation
    return Usage(
        prompt_tokens=summary.prompt_tokens,
        completion_tokens=summary.completion_tokens,
        total_tokens=summary.prompt_tokens + summary.completion_tokens,
        prompt_tokens_details=PromptDetails(cached_tokens=summary.cached_tokens),
        completion_tokens_details=CompletionDetails(
            accepted_prediction_tokens=speculation.accepted,
            rejected_prediction_tokens=speculation.drafted_nodes - speculation.accepted,
        ),
    )


def metrics_of(summary: Summary) -> Metrics:
    first, decoding, speculation = summary.first_token_seconds, summary.decoding_seconds, summary.speculation
    return Metrics(
        time_to_first_token=None if first is None else round(first, 6),
        seconds=round(summary.last_token_seconds or 0.0, 6),
        tokens_per_second=round((summary.completion_tokens - 1) / decoding, 3) if decoding > 0 else None,
        mean_acceptance_length=speculation.mean_acceptance_length,
        num_drafts=speculation.drafts,
        num_draft_tokens=speculation.drafted_nodes,
        num_accepted_tokens=speculation.accepted,
    )
