"""``LLM`` over real stage processes: the same tokens whatever the stages, the strategy, the drafter and the company."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock import LLM, CompletionOutput, ConfigError, FinishReason, PipelineError, RequestError, SamplingParams
from penstock.core import SpeculationMetrics
from penstock.drafters.base import DRAFTERS as METHODS
from penstock.drafters.base import Weights
from penstock.engine.completion import Prompt
from penstock.engine.loop import Observer
from penstock.lab.bench.comparison import decode
from penstock.noise import gumbel
from penstock.speculation import SpeculativeConfig, parse_speculative
from penstock.transport.addresses import LinkSecurity
from tests.checkpoints import EOS, make_checkpoint
from tests.links import host_of

pytestmark = pytest.mark.processes

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SHORT = "def f(x):"
LONG = "The quick brown fox jumps over the lazy dog, and then it rests. " * 2
"""Eight chunks of sixteen tokens: prompts follow each other through the stages in pieces."""

CASES: list[tuple[str, SamplingParams]] = [
    (SHORT, GREEDY),
    (LONG, GREEDY),
    (SHORT, SamplingParams(temperature=1.0, seed=5, max_tokens=24, ignore_eos=True)),
    (LONG, SamplingParams(temperature=1.0, seed=6, max_tokens=20, n=2, logprobs=2)),
    (
        SHORT,
        SamplingParams(temperature=0.7, seed=7, max_tokens=20, top_p=0.9, top_k=30, min_p=0.02, logprobs=3, n=2),
    ),
    ("x", SamplingParams(temperature=1.5, seed=8, max_tokens=12, min_tokens=12, stop_token_ids=[*range(3, 130)])),
]


@pytest.fixture(scope="module")
def model(target: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def plain(target: Path) -> Iterator[LLM]:
    """One stage, nothing speculated."""
    with LLM(str(target), speculative_config=None, max_model_len=256, prefill_chunk=512) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(plain: LLM) -> list[list[CompletionOutput]]:
    """Return each case's outputs when it is the only request."""
    return [plain.generate(prompt, params)[0].outputs for prompt, params in CASES]


@pytest.fixture(scope="module")
def shared(target: Path, draft: Path) -> Iterator[LLM]:
    """Three stages fed by a draft model."""
    speculation = {"method": "draft_model", "model": str(draft), "width": 4, "children": 3}
    options: dict[str, Any] = {"max_model_len": 200, "kv_slots": 240, "prefill_chunk": 16}
    with LLM(str(target), pipeline_parallel_size=3, speculative_config=speculation, **options) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """``shared``, which every test leaves idle and with all slots free."""
    yield shared
    assert_idle(shared)


def assert_idle(llm: LLM) -> None:
    pool = llm.loop.pool
    llm.loop.audit()
    assert not llm.loop.busy
    assert not llm.loop.scheduler.waiting
    assert not llm.loop.scheduler.running
    assert (pool.committed, pool.speculative, pool.reserved) == (0, 0, 0)
    assert not llm.loop.builder._told, "the stages still think that a request is open"
    assert not getattr(llm.drafter, "_builder", llm.loop.builder)._told


def ids_of(llm: LLM, text: str) -> list[int]:
    return llm.get_tokenizer().encode(text)


def generated(model: Any, prompt: list[int], count: int, **options: Any) -> list[int]:
    """Return the tokens of transformers' own greedy ``generate``."""
    settings = {"eos_token_id": None, "pad_token_id": 2, **options}
    out = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, **settings)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def assert_same(found: Sequence[CompletionOutput], expected: Sequence[CompletionOutput]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert (one.text, one.finish_reason, one.stop_reason) == (other.text, other.finish_reason, other.stop_reason)
        assert (one.logprobs is None) == (other.logprobs is None)
        for mine, its in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert list(mine) == list(its)
            np.testing.assert_allclose([p.logprob for p in mine.values()], [p.logprob for p in its.values()], atol=1e-4)
            assert [p.rank for p in mine.values()] == [p.rank for p in its.values()]


# ----------------------------------------------------------------------------------------------------- the same tokens


def test_greedy_is_that_of_transformers(model: Any, plain: LLM, alone: list[list[CompletionOutput]]) -> None:
    for (prompt, params), outputs in list(zip(CASES, alone, strict=True))[:2]:
        expected = generated(model, ids_of(plain, prompt), params.max_tokens)
        assert len(set(expected)) > 8, "a text that repeats itself would hide mistakes"
        assert outputs[0].token_ids == expected


def test_sampling_is_an_argmax_over_logits_and_noise(
    model: Any, plain: LLM, alone: list[list[CompletionOutput]]
) -> None:
    tokens, prompt = alone[3][1].token_ids, ids_of(plain, LONG)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0].double().numpy()
    for i, token in enumerate(tokens):
        position = len(prompt) + i
        scores = logits[position - 1]
        assert token == (scores + gumbel(6, 1, position, len(scores))).argmax()
        chance = torch.log_softmax(torch.tensor(scores), -1)
        assert alone[3][1].logprobs is not None
        assert alone[3][1].logprobs[i][token].logprob == pytest.approx(float(chance[token]), abs=1e-4)
        assert list(alone[3][1].logprobs[i])[:2] == chance.topk(2).indices.tolist()


OPTIONS: dict[str, dict[str, Any]] = {
    "ngram": {"prompt_lookup_max": 3},
    "synthetic": {"accuracy": [0.6, 0.8, 0.9]},
}
"""Options of drafters that need some, or show more with others than their defaults."""
DRAFTERS = {
    name: {"method": name, **OPTIONS.get(name, {})}
    for name, kind in METHODS.items()
    if kind.weights is not Weights.SPECULATOR  # those that read the target's states: test_learned.py
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "static_tree": {"tree_size": 9, "tree_depth": 3, "children": 3},
    "pipedec": {"width": 6, "children": 4},
    "flowspec": {"tree_size": 12, "tree_depth": 3, "segment": 4, "children": 4, "expansion_depth": 2},
    "continuous": {"width": 12, "children": 4},
    "auto": {"width": 12, "children": 4},
}


EACH = [*zip(itertools.cycle((3, 1, 5)), DRAFTERS, strict=False)]
"""Every drafter, every kind of link and every number of stages; all of their pairs are in the whole matrices."""


@pytest.mark.parametrize(
    ("stages", "drafter"),
    [
        pytest.param(*pair, marks=[pytest.mark.whole] * (pair not in EACH))
        for pair in itertools.product((1, 3, 5), DRAFTERS)
    ],
)
def test_same_tokens_from_every_stage_count_strategy_and_drafter(
    target: Path, draft: Path, security: LinkSecurity, alone: list[list[CompletionOutput]], stages: int, drafter: str
) -> None:
    table = dict(DRAFTERS[drafter], **({"model": str(draft)} if drafter == "draft_model" else {}))
    configs = [parse_speculative({**table, "strategy": name, **options}) for name, options in STRATEGIES.items()]
    speculation: list[SpeculativeConfig | None] = [None, *configs]
    kind = {1: "tcp", 3: "tls", 5: "ipc"}[stages]
    with LLM(
        str(target),
        host=host_of(kind, security),
        pipeline_parallel_size=stages,
        speculative_config=configs[0],
        max_model_len=256,
        prefill_chunk=16,
        speculative_slots=60,
    ) as llm:
        for config in speculation:
            metrics = checked_run(llm, config, alone)
            if config is not None and config.strategy == "auto":
                continue  # It may find, in real time, that nothing is worth drafting.
            assert (sum(m.drafted_nodes for m in metrics) > 0) == (config is not None)
            if drafter == "synthetic" and config is not None and (stages > 1 or config.strategy == "static_tree"):
                # What has been drafted by each step depends on who wakes first: now and then it is nothing.
                runs = itertools.chain([metrics], (checked_run(llm, config, alone) for _ in range(20)))
                assert any(m.accepted > 0 for run in runs for m in run), "nothing was speculated"


def checked_run(
    llm: LLM, config: SpeculativeConfig | None, alone: list[list[CompletionOutput]]
) -> list[SpeculationMetrics]:
    """Run all cases at once: each has the tokens that it has alone, and no request is left."""
    outputs = decode(llm, [prompt for prompt, _ in CASES], [params for _, params in CASES], config)
    for output, expected in zip(outputs, alone, strict=True):
        assert_same(output.outputs, expected)
    assert_idle(llm)
    return [completion.metrics for output in outputs for completion in output.outputs]


def test_stages_without_layers(target: Path, alone: list[list[CompletionOutput]]) -> None:
    split = "1,0,1,1,0,1,1"
    with LLM(str(target), layer_split=split, max_model_len=256, speculative_config={"method": "ngram"}) as llm:
        assert_same(llm.generate(*CASES[1])[0].outputs, alone[1])


def test_a_split_by_hand(target: Path, alone: list[list[CompletionOutput]]) -> None:
    with LLM(str(target), layer_split="1,4", speculative_config=None, max_model_len=256) as llm:
        assert llm.setup.layers == ((0, 1), (1, 5))
        assert_same(llm.generate(*CASES[1])[0].outputs, alone[1])


# -------------------------------------------------------------------------------------------------- shape of what comes


def test_outputs_are_shaped_like_vllms(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, ignore_eos=True)
    first, second = llm.generate([SHORT, {"prompt_token_ids": [5, 6, 7]}], params)
    assert (first.prompt, first.prompt_token_ids) == (SHORT, ids_of(llm, SHORT))
    assert (second.prompt, second.prompt_token_ids) == (None, [5, 6, 7])
    assert first.request_id != second.request_id
    assert first.finished
    (completion,) = first.outputs
    assert completion.index == 0
    assert completion.text == llm.get_tokenizer().decode(completion.token_ids)
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.LENGTH, None)
    assert completion.finish_reason == "length"
    assert completion.logprobs is not None
    assert [token in entry for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)] == [
        True
    ] * 5
    assert completion.seconds is not None
    assert completion.first_token_seconds is not None
    assert completion.seconds >= completion.first_token_seconds > 0


def test_prompts_come_in_three_forms(llm: LLM) -> None:
    prompts: list[Prompt] = [SHORT, {"prompt": SHORT}, {"prompt_token_ids": np.array(ids_of(llm, SHORT))}]
    texts = [output.outputs[0].text for output in llm.generate(prompts, GREEDY)]
    assert len(set(texts)) == 1
    assert llm.generate([], GREEDY) == []


def test_completions_of_one_prompt_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=11, max_tokens=8, ignore_eos=True)
    first, again = llm.generate([SHORT, SHORT], params)
    assert [completion.index for completion in first.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in first.outputs}) == 3
    assert_same(first.outputs, again.outputs)
    unseeded = SamplingParams(max_tokens=8, ignore_eos=True)
    outputs = llm.generate([SHORT, SHORT], unseeded)
    assert outputs[0].outputs[0].token_ids != outputs[1].outputs[0].token_ids


def test_more_requests_than_fit_at_once(llm: LLM) -> None:
    """The pool holds three of these requests at a time."""
    params = [dataclasses.replace(GREEDY, max_tokens=40 + i) for i in range(10)]
    outputs = llm.generate([SHORT] * 10, params)
    longest = outputs[-1].outputs[0].token_ids
    assert [output.outputs[0].token_ids for output in outputs] == [longest[: 40 + i] for i in range(10)]


def test_default_sampling_is_the_checkpoints(llm: LLM) -> None:
    assert isinstance(llm.get_default_sampling_params(), SamplingParams)
    assert llm.generate(SHORT)[0].finished


# ---------------------------------------------------------------------------------------------------- how a text ends


def test_max_tokens(llm: LLM) -> None:
    longest = llm.generate(SHORT, GREEDY)[0].outputs[0].token_ids
    for count in (1, 2, 7):
        (completion,) = llm.generate(SHORT, dataclasses.replace(GREEDY, max_tokens=count))[0].outputs
        assert completion.token_ids == longest[:count]
        assert completion.finish_reason is FinishReason.LENGTH


def test_stop_token_ids(llm: LLM) -> None:
    tokens = llm.generate(SHORT, GREEDY)[0].outputs[0].token_ids
    stop = tokens[9]
    (completion,) = llm.generate(SHORT, dataclasses.replace(GREEDY, stop_token_ids=[stop, 2**31 - 1]))[0].outputs
    end = tokens.index(stop) + 1
    assert completion.token_ids == tokens[:end]
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, stop)


def test_a_text_may_end_at_its_last_token(llm: LLM) -> None:
    tokens = llm.generate(SHORT, GREEDY)[0].outputs[0].token_ids
    last = next(i for i in range(5, 24) if tokens[i] not in tokens[:i])
    params = dataclasses.replace(GREEDY, max_tokens=last + 1, stop_token_ids=[tokens[last]])
    (completion,) = llm.generate(SHORT, params)[0].outputs
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, tokens[last])


def test_stop_strings(llm: LLM) -> None:
    whole = llm.generate(SHORT, GREEDY)[0].outputs[0]
    stop = next(whole.text[i : i + 2] for i in range(4, len(whole.text)) if whole.text[i : i + 2].isascii())
    for include in (False, True):
        params = dataclasses.replace(GREEDY, stop=["not there", stop], include_stop_str_in_output=include)
        (completion,) = llm.generate(SHORT, params)[0].outputs
        end = whole.text.index(stop) + len(stop) * include
        assert completion.text == whole.text[:end]
        assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
        assert len(completion.token_ids) < len(whole.token_ids)
        assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, stop)


def test_end_of_sequence_tokens(target: Path, model: Any, tmp_path: Path) -> None:
    """There are several, from generation_config; min_tokens keeps them away and ignore_eos lets them pass."""
    prompt = [40, 50, 60]
    tokens = generated(model, prompt, 24)
    ends = [tokens[12], tokens[6]]
    first = min(tokens.index(end) for end in ends) + 1
    folder = tmp_path / "model"
    make_checkpoint(folder, "llama", seed=2, tokenizer=True)
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {ends}, "do_sample": false}}')
    with LLM(str(folder), pipeline_parallel_size=2, max_model_len=256, speculative_config={"method": "ngram"}) as llm:

        def complete(**params: Any) -> CompletionOutput:
            settings = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **params})
            return llm.generate({"prompt_token_ids": prompt}, settings)[0].outputs[0]

        assert llm.get_default_sampling_params().temperature == 0
        assert complete().token_ids == tokens[:first]
        assert (complete().finish_reason, complete().stop_reason) == (FinishReason.STOP, None)
        assert complete(ignore_eos=True).token_ids == tokens
        patient = generated(model, prompt, 24, eos_token_id=ends, min_new_tokens=15)
        assert complete(min_tokens=15).token_ids == patient
        assert len(patient) >= 15
        assert_idle(llm)


def test_min_tokens_holds_stop_strings_off(llm: LLM) -> None:
    whole = llm.generate(SHORT, GREEDY)[0].outputs[0]
    stop = next(c for c in whole.text if c.isascii())
    (completion,) = llm.generate(SHORT, dataclasses.replace(GREEDY, stop=stop, min_tokens=23))[0].outputs
    assert len(completion.token_ids) >= 23


# ------------------------------------------------------------------------------------------------------------ streaming


def test_streaming_gives_the_same_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=40, ignore_eos=True)
    whole = llm.generate(SHORT, params)[0].outputs[0].text
    pieces = list(llm.stream(SHORT, params))
    assert "".join(pieces) == whole
    assert all(pieces)
    assert len(pieces) > 1


def test_streams_and_calls_interleave(llm: LLM) -> None:
    params = dataclasses.replace(GREEDY, max_tokens=30)
    whole = llm.generate(SHORT, params)[0].outputs[0]
    one, other = llm.stream(SHORT, params), llm.stream(SHORT, params)
    text = next(one) + next(one)
    again = next(other)
    assert llm.generate(SHORT, params)[0].outputs[0].token_ids == whole.token_ids
    assert text + "".join(one) == whole.text
    assert again + "".join(other) == whole.text


def test_a_stream_may_be_left(llm: LLM) -> None:
    stream = llm.stream(LONG, dataclasses.replace(GREEDY, max_tokens=60))
    assert isinstance(stream, Generator)
    next(stream)
    stream.close()
    assert_idle(llm)
    with pytest.raises(RequestError):
        llm.stream(SHORT, dataclasses.replace(GREEDY, max_tokens=1000))


# ----------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ("", "the prompt is empty"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ([SHORT, ""], "the prompt is empty"),
        (5, "prompts is 5"),
        (None, "prompts is None"),
        ([1, 2, 3], "a prompt is a string"),
        ({"text": "x"}, "a prompt is a string"),
        ({"prompt_token_ids": "abc"}, "list of token ids"),
        ({"prompt_token_ids": None}, "list of token ids"),
        ({"prompt_token_ids": [1.0]}, "whole number"),
        ({"prompt_token_ids": [259]}, "holds 259; the model's token ids are 0 to 258"),
        ({"prompt_token_ids": [3, -1]}, "holds -1"),
        ({"prompt_token_ids": [2**70]}, "token ids are 0 to 258"),
        ("\ud800", r"prompt holds U\+D800"),
        ("x" * 200, r"prompt of 200 tokens \+ max_tokens 24 = 224 exceeds max_model_len 200"),
    ],
)
def test_prompts_that_cannot_work_are_refused(llm: LLM, prompt: Any, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        llm.generate(prompt, GREEDY)
    assert_idle(llm)
    assert llm.generate(SHORT, GREEDY)[0].finished


def test_one_bad_request_keeps_the_others_from_starting(llm: LLM) -> None:
    with pytest.raises(RequestError, match="max_model_len"):
        llm.generate([SHORT, SHORT, LONG * 2], GREEDY)
    assert_idle(llm)


def test_a_token_beyond_the_vocabulary_is_one_prompts_error(tmp_path: Path) -> None:
    """A token that was added to the tokenizer has no row in the embedding. What runs goes on, and no stage is lost."""
    folder = make_checkpoint(tmp_path / "x", tokenizer=True)
    inner = AutoTokenizer.from_pretrained(folder)
    inner.add_tokens([AddedToken("<extra>", special=True)])
    inner.save_pretrained(folder)
    good, beyond = "a b", inner.convert_tokens_to_ids("<extra>")
    with LLM(str(folder), pipeline_parallel_size=2, max_model_len=128) as llm:
        wanted, stages = "".join(llm.stream(good, GREEDY)), stages_of_this_process()
        running = llm.stream(good, GREEDY)
        begin = next(running)
        for bad in ("b<extra>", {"prompt": "<extra>"}, {"prompt_token_ids": [5, beyond]}):
            with pytest.raises(RequestError, match=rf"^prompts\[1\]: .*{beyond}.*the model's token ids are 0 to"):
                llm.generate([good, bad, "c"], GREEDY)
        with pytest.raises(RequestError, match=r"^the prompt holds '<extra>'"):
            llm.generate("<extra>", GREEDY)
        assert begin + "".join(running) == wanted
        first, second = llm.generate([good, "c"], GREEDY)
        assert first.outputs[0].text == wanted
        assert second.finished
        assert stages_of_this_process() == stages
        assert_idle(llm)


def stages_of_this_process() -> set[int]:
    return {stage.pid for server in psutil.Process().children() for stage in server.children()}


def test_a_request_above_the_slots_is_refused_with_the_numbers(target: Path) -> None:
    with LLM(str(target), max_model_len=256, kv_slots=64, skip_tokenizer_init=True) as llm:
        prompt = {"prompt_token_ids": [5] * 50}
        with pytest.raises(RequestError, match=r"prompt of 50 tokens \+ max_tokens 15 needs 65 KV slots of 64"):
            llm.generate(prompt, dataclasses.replace(GREEDY, max_tokens=15))
        (output,) = llm.generate(prompt, dataclasses.replace(GREEDY, max_tokens=14))
        assert len(output.outputs[0].token_ids) == 14
        assert output.outputs[0].text == ""
        for call in (lambda: llm.generate("text", GREEDY), lambda: llm.stream(prompt, GREEDY), llm.get_tokenizer):
            with pytest.raises(RequestError, match="tokenizer"):
                call()
        with pytest.raises(RequestError, match="stop strings need a tokenizer"):
            llm.generate(prompt, SamplingParams(stop="x"))
        assert_idle(llm)


def test_sampling_params_must_fit_the_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 entries for 1 prompts"):
        llm.generate(SHORT, [GREEDY, GREEDY])
    for wrong in ({"temperature": 0}, [None], "greedy", 3):
        with pytest.raises(RequestError, match="sampling_params has to be"):
            llm.generate(SHORT, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "complaint"),
    [
        ({"temperature": "1"}, "temperature is '1'; it has to be a number"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 1.5}, "top_k is 1.5; it has to be a whole number"),
        ({"top_k": 2**40}, "top_k"),
        ({"max_tokens": None}, "max_tokens is None"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": [5]}, "stop"),
        ({"logprobs": 101}, "logprobs"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
    ],
)
def test_parameters_that_cannot_work_are_refused(params: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        SamplingParams(**params)


def test_numbers_of_other_libraries_reach_the_stages(llm: LLM) -> None:
    numbers: dict[str, Any] = {
        "temperature": np.float32(0.0),
        "seed": np.int64(3),
        "max_tokens": np.int32(4),
        "top_k": np.int8(1),
        "min_tokens": np.int64(1),
        "stop_token_ids": np.array([1]),
        "stop": None,
        "logprobs": np.uint8(0),
    }
    params = SamplingParams(**numbers)
    tokens = llm.generate({"prompt_token_ids": torch.tensor([5, 6, 7])}, params)[0].outputs[0].token_ids
    assert tokens == llm.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY)[0].outputs[0].token_ids[:4]


def test_options_that_cannot_work_are_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not an option of LLM; did you mean 'pipeline_parallel_size'"):
        LLM(str(target), pipeline_paralel_size=2)
    with pytest.raises(ConfigError, match="there is no folder"):
        LLM(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="max_model_len is 1000"):
        LLM(target, max_model_len=1000)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size is a string \('2'\); expected an integer"):
        LLM(target, pipeline_parallel_size="2")
    with pytest.raises(ConfigError, match="speculative_slots is -1"):
        LLM(target, speculative_slots=-1)
    other = make_checkpoint(tmp_path / "other", "llama")
    with pytest.raises(ConfigError, match="has a vocabulary of 160 tokens, the target 259"):
        LLM(str(target), speculative_config={"method": "draft_model", "model": str(other)})
    with pytest.raises(ConfigError, match="skip_tokenizer_init"):
        LLM(str(other))


def test_synthetic_drafts_need_a_seed(target: Path) -> None:
    with LLM(str(target), max_model_len=256, speculative_config={"method": "synthetic", "accuracy": [0.5]}) as llm:
        with pytest.raises(RequestError, match="fixed seed"):
            llm.generate(SHORT, SamplingParams())
        assert llm.generate(SHORT, SamplingParams(temperature=0, max_tokens=4))[0].finished
        assert_idle(llm)


def test_a_closed_llm_says_so(target: Path) -> None:
    llm = LLM(str(target), speculative_config=None, max_model_len=256)
    stream = llm.stream(SHORT, dataclasses.replace(GREEDY, max_tokens=100))
    next(stream)
    llm.close()
    llm.close()
    with pytest.raises(PipelineError, match="closed"):
        llm.generate(SHORT, GREEDY)
    with pytest.raises(PipelineError, match="closed before the text was complete"):
        list(stream)


class Interrupted(Observer):
    """An observer at which Ctrl-C comes in the middle of a step."""

    def submitted(self, *args: Any) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_while_waiting_costs_the_call_only(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speculation = {"method": "ngram"}
    with LLM(target, pipeline_parallel_size=2, max_model_len=256, speculative_config=speculation) as llm:
        expected = llm.generate(SHORT, GREEDY)[0].outputs[0].token_ids
        wait, calls = llm.loop.clock.inbox.wait, itertools.count()  # type: ignore[attr-defined]

        def interrupted(until: float | None) -> None:
            if next(calls) == 15:
                raise KeyboardInterrupt
            wait(until)

        monkeypatch.setattr(llm.loop.clock.inbox, "wait", interrupted)  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt):
            llm.generate([SHORT, LONG], GREEDY)
        assert_idle(llm)
        assert llm.generate(SHORT, GREEDY)[0].outputs[0].token_ids == expected


def test_an_interrupt_in_the_middle_of_a_step_ends_the_engine_and_says_so(target: Path) -> None:
    with LLM(target, speculative_config=None, max_model_len=256) as llm:
        with llm.observing(Interrupted()), pytest.raises(KeyboardInterrupt):
            llm.generate(SHORT, GREEDY)
        with pytest.raises(PipelineError, match="KeyboardInterrupt"):
            llm.generate(SHORT, GREEDY)


def test_importing_penstock_imports_no_torch() -> None:
    code = "import penstock, sys; penstock.SamplingParams(); assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_eos_is_that_of_the_config(plain: LLM) -> None:
    assert plain.setup.checkpoint.eos_token_ids == (EOS,)
