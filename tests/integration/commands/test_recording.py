"""A recording says what the engine's own drafter and target say on the target's path."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.config import FieldError
from penstock.core import CompletionOutput, RequestOutput, SamplingParams
from penstock.drafters.base import Draft
from penstock.engine.completion import sampling_of
from penstock.engine.loop import Observer
from penstock.engine.options import EngineOptions
from penstock.engine.resolve import Resolved, resolve_options
from penstock.lab import record as recorder
from penstock.lab.record import Recording, check_alike, check_record, record
from penstock.messages import Sampling
from penstock.models import stage_model
from penstock.noise import gumbel
from penstock.requests.request import Request
from penstock.speculation import SpeculativeConfig
from penstock.strategies.base import Autoregressive
from penstock.strategies.pipedec import PipeDec
from tests.engines import InProcessEngine, Picks
from tests.unit.cli.invoke import invoke

pytestmark = pytest.mark.processes

PROMPTS = [[72, 101, 108, 108, 111], [100 + i % 90 for i in range(140)], [50, 60, 70]]
"""Two prompts; the second is longer than a chunk, so it enters in several batches."""
TOKENS = 20
SETTINGS = {
    "T=0": {"temperature": 0.0},
    "T=1": {"temperature": 1.0},
    "T=0.6": {"temperature": 0.6, "top_p": 0.9, "top_k": 80},
}
SAMPLED_OR_ALL = ["T=0", "T=0.6", pytest.param("T=1", marks=pytest.mark.whole)]
"""The last is the second without filters."""


class Watch(Observer):
    """Keeps the drafter's answers by request and position of the guessed token, while their nodes are roots."""

    def __init__(self) -> None:
        self.drafts: list[Draft] = []

    def drafted(self, drafts: Sequence[Draft], asked_at: float, at: float) -> None:
        self.drafts += drafts


def decode(
    target: Path, draft: Path, params: Sequence[SamplingParams], speculating: bool
) -> tuple[list[Request], list[Draft]]:
    """Decode every prompt with the in-process engine; return what its drafter answered."""
    engine = InProcessEngine(target, 3, draft)
    watch = Watch()
    engine.loop.observers.append(watch)
    requests = [
        engine.submit(prompt, sampling, TOKENS, PipeDec(3, width=6, children=6) if speculating else Autoregressive())
        for prompt, sampling in zip(PROMPTS, map(sampling_for, PROMPTS, params), strict=True)
    ]
    engine.run()
    return requests, watch.drafts


def sampling_for(prompt: list[int], params: SamplingParams) -> Sampling:
    return sampling_of(params, params.seed or 0, 0, frozenset(), len(prompt))


def params_of(setting: str) -> list[SamplingParams]:
    return [SamplingParams(seed=40 + i, max_tokens=TOKENS, **SETTINGS[setting]) for i in range(len(PROMPTS))]


def tokens_of(request: Request) -> list[int]:
    assert isinstance(request.output, Picks)
    return request.output.tokens


def resolved(target: Path, draft: Path) -> Resolved:
    config = {"method": "draft_model", "model": str(draft)}
    return resolve_options(EngineOptions(model=str(target), pipeline_parallel_size=3, speculative_config=config))


def recorded(
    target: Path, draft: Path, requests: Sequence[Request], params: Sequence[SamplingParams], file: Path
) -> Recording:
    outputs = [
        RequestOutput("", None, request.prompt, [CompletionOutput(0, tokens_of(request))], True) for request in requests
    ]
    return record(file, resolved(target, draft), outputs, params)


@pytest.mark.parametrize("setting", SAMPLED_OR_ALL)
def test_candidates_are_those_of_the_engines_drafter(setting: str, target: Path, draft: Path, tmp_path: Path) -> None:
    params = params_of(setting)
    plain, _ = decode(target, draft, params, speculating=False)
    recording = recorded(target, draft, plain, params, tmp_path / "a.safetensors")
    speculated, drafts = decode(target, draft, params, speculating=True)
    assert [tokens_of(request) for request in speculated] == [tokens_of(request) for request in plain]
    assert recording.tokens.tolist() == [token for request in plain for token in tokens_of(request)]
    assert recording.header.undecided == 0
    answers = {draft.node.id: draft.candidates for draft in drafts if draft.candidates}
    compared = 0
    for number, request in enumerate(speculated):
        rows, first = recording.rows(number), len(request.prompt)
        for i in range(TOKENS):
            answer = answers.get(request.committed[first + i - 1].id)
            if answer is None:  # a miss came before the drafter was asked
                continue
            compared += 1
            row = rows.start + i
            assert recording.candidates[row, : len(answer)].tolist() == [token for token, _ in answer]
            assert recording.chances[row, : len(answer)] == pytest.approx([chance for _, chance in answer], abs=1e-3)
    assert compared > TOKENS * len(PROMPTS) / 2


@pytest.mark.parametrize("setting", SAMPLED_OR_ALL)
def test_distributions_are_those_that_the_tokens_were_sampled_from(
    setting: str, target: Path, draft: Path, tmp_path: Path
) -> None:
    """Against transformers; and with the request's noise they give the recorded tokens."""
    params = params_of(setting)
    plain, _ = decode(target, draft, params, speculating=False)
    recording = recorded(target, draft, plain, params, tmp_path / "a.safetensors")
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (target, draft)]
    for number, request in enumerate(plain):
        text = [*request.prompt, *tokens_of(request)]
        with torch.inference_mode():
            logits = [model(torch.tensor([text])).logits[0].double() for model in models]
        for i, row in enumerate(range(*recording.rows(number).indices(len(recording.tokens)))):
            position = len(request.prompt) + i
            scale = params[number].temperature or 1.0
            dense = [dense_row(recording, row, part) for part in ("target", "draft")]
            for found, full in zip(dense, logits, strict=True):
                expected = torch.softmax(full[position - 1] / scale, -1).numpy()
                kept = found > 0
                assert found[kept] == pytest.approx(expected[kept] / expected[kept].sum(), rel=1e-3)
            noise = gumbel(params[number].seed or 0, 0, position, len(dense[0])) if params[number].temperature else 0.0
            with np.errstate(divide="ignore"):
                assert int((np.log(dense[0]) + noise).argmax()) == recording.tokens[row]
            assert recording.token_probs[row].tolist() == [one[text[position]] for one in dense]


def dense_row(recording: Recording, row: int, part: str) -> np.ndarray:
    """One recorded distribution over the whole vocabulary; the cut loses nothing at 259 tokens with few left out."""
    whole = np.zeros(recording.header.vocabulary, dtype=np.float32)
    other = {"target": ("draft_ids", "target_of_draft"), "draft": ("target_ids", "draft_of_target")}[part]
    for ids, probs in ((f"{part}_ids", f"{part}_probs"), other):
        there = getattr(recording, ids)[row] >= 0
        whole[getattr(recording, ids)[row][there]] = getattr(recording, probs)[row][there]
    return whole


def test_never_more_than_one_stage_is_in_memory(
    target: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[Any]] = []
    loaded: list[tuple[int, int]] = []
    read_module = stage_model.read_module

    def watched(checkpoint: Checkpoint, first: int, last: int, *rest: Any, **options: Any) -> Any:
        module = read_module(checkpoint, first, last, *rest, **options)
        if last > first:
            assert [ref for ref in alive if ref() is not None] == []
            loaded.append((first, last))
            layers = getattr(getattr(module, checkpoint.parts.base), checkpoint.parts.layers)
            alive.extend(weakref.ref(part) for layer in layers[first:last] for part in layer.modules())
        return module

    params = params_of("T=1")
    plain, _ = decode(target, draft, params, speculating=False)
    gc.collect()
    monkeypatch.setattr(stage_model, "read_module", watched)
    recorded(target, draft, plain, params, tmp_path / "a.safetensors")
    assert loaded == [(0, 5), *resolved(target, draft).layers]
    assert [ref for ref in alive if ref() is not None] == []


def test_a_cut_recording_keeps_the_most_probable_tokens(
    target: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = params_of("T=1")
    plain, _ = decode(target, draft, params, speculating=False)
    whole = recorded(target, draft, plain, params, tmp_path / "a.safetensors")
    monkeypatch.setattr(recorder, "WIDTH", 10)
    monkeypatch.setattr(recorder, "CANDIDATES", 4)
    cut = recorded(target, draft, plain, params, tmp_path / "b.safetensors")
    for name in ("target_ids", "target_probs", "draft_of_target", "draft_ids", "draft_probs", "target_of_draft"):
        np.testing.assert_array_equal(cut.arrays()[name], whole.arrays()[name][:, :10])
    np.testing.assert_array_equal(cut.candidates, whole.candidates[:, :4])
    listed = cut.target_probs.sum(axis=1) + np.where(
        (cut.draft_ids[:, :, None] == cut.target_ids[:, None]).any(axis=2), 0, cut.target_of_draft
    ).sum(axis=1)
    assert listed + cut.rest[:, :, 0].sum(axis=1) == pytest.approx(np.ones(len(cut.tokens)), abs=1e-5)
    assert (cut.rest[:, 0, 0] >= cut.rest[:, 0, 1]).all()
    assert (cut.rest[:, 1, 0] <= cut.rest[:, 1, 1]).all()


@pytest.mark.parametrize(
    ("speculation", "words"),
    [
        (None, "record needs .* no strategy drafts"),
        (SpeculativeConfig(method="ngram"), "record needs .* the method is 'ngram'"),
    ],
)
def test_a_recording_needs_a_draft_model(tmp_path: Path, speculation: SpeculativeConfig | None, words: str) -> None:
    with pytest.raises(FieldError, match=words):
        check_record(tmp_path / "a.safetensors", speculation)


def test_a_recording_needs_a_folder_and_requests_that_are_alike(tmp_path: Path) -> None:
    drafting = SpeculativeConfig(method="draft_model", model="demo")
    check_record(tmp_path / "a.safetensors", drafting)
    for path in (tmp_path, tmp_path / "none" / "a.safetensors"):
        with pytest.raises(FieldError, match=r"record is .* a file in a folder that exists"):
            check_record(path, drafting)
    with pytest.raises(FieldError, match=r"temperature is \[0.0, 1.0\]"):
        check_alike([SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)])


def test_a_bench_records_and_acceptance_reads(target: Path, draft: Path, tmp_path: Path) -> None:
    """The bench writes one file per temperature."""
    prompts = tmp_path / "some.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("def main():", "import")))
    bench = ["bench", "--model", str(target), "--prompts", str(prompts), "--max-tokens", "9", "-pp", "2"]
    drafting = ["--draft-model", str(draft), "--strategies", "autoregressive,static_tree", "--temperature", "0,0.8"]
    done = invoke(*bench, *drafting, "--top-k", "20", "--record", str(tmp_path / "a.safetensors"))
    assert done.exit_code == 0, done.stderr
    files = [tmp_path / f"a-T{temperature}.safetensors" for temperature in ("0", "0.8")]
    cold, warm = map(Recording.load, files)
    assert (cold.header.temperature, warm.header.temperature, warm.header.top_k) == (0.0, 0.8, 20)
    assert (warm.header.target.name, warm.header.draft.name) == (target.name, draft.name)
    assert warm.header.seeds == (0, 1)
    assert warm.prompt_lengths.tolist() == [len("def main():"), len("import")]
    assert ((warm.target_ids >= 0).sum(axis=1) == 20).all()
    report = invoke("acceptance", *map(str, files), "--json")
    assert report.exit_code == 0, report.stderr
    assert [len(one["rules"]) for one in json.loads(report.stdout)["recordings"]] == [1, 4]


def test_what_cannot_be_recorded_or_read_is_refused_before_anything_starts(target: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    refused = invoke("bench", "--model", str(target), "--strategies", "pipedec", "--record", str(file))
    assert refused.exit_code == 2
    assert refused.stderr.startswith("penstock: error: record needs a draft model's distributions, but the method is")
    missing = invoke("acceptance", str(file))
    assert missing.exit_code == 2
    assert missing.stderr == f"penstock: error: {file}: there is no such file; penstock bench --record writes one\n"
