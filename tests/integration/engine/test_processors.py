"""Penalties, bias, allowed tokens and grammars: the tokens of plain decoding, whatever speculates."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock import LLM, RequestError, SamplingParams, StructuredOutputsParams
from penstock.drafters.base import Drafter, SyntheticDrafter
from penstock.drafters.merged import NgramDrafter
from penstock.engine.build import PLAIN
from penstock.engine.completion import sampling_of
from penstock.engine.options import DEMO
from penstock.engine.resolve import DEMO_DRAFTERS
from penstock.lab.bench.comparison import decode
from penstock.messages import Sampling
from penstock.requests.request import Request
from penstock.strategies.auto import Continuous
from penstock.strategies.base import Autoregressive
from penstock.strategies.pipedec import PipeDec
from penstock.text.tokenizer import load_tokenizer
from tests.checkpoints import make_checkpoint
from tests.engines import InProcessEngine
from tests.exactness import CODE, check_same, strategies, submit_with, tokens_of

TOKENS = 20
EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["list", "dict", "set"]},
        "done": {"type": "boolean"},
    },
    "required": ["name", "size", "kind", "done"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": ""},
}
GRAMMARS = {
    "json": StructuredOutputsParams(json=SCHEMA),
    "regex": StructuredOutputsParams(regex=r"    (if|while) [a-z]{1,9} (==|<) \d{1,3}:\n        return [a-z]{1,12}\n"),
    "choice": StructuredOutputsParams(choice=["    return None\n", "    return x\n", "    raise ValueError(x)\n"]),
    "json_object": StructuredOutputsParams(json_object=True),
    "grammar": StructuredOutputsParams(grammar='start: "    return " term ("+" term)*\nterm: /[a-z]{1,3}/ | /[0-9]+/'),
}
CASES: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    "rewards": {"presence_penalty": -2.0, "frequency_penalty": -1.0},
    "logit_bias": {"logit_bias": {614: -100.0, 487: -2.5, 14: 1.5, 16: -1.0}},
    "allowed_token_ids": {"allowed_token_ids": range(3, 400)},
    **{name: {"structured_outputs": structure} for name, structure in GRAMMARS.items()},
    "all together": {
        "structured_outputs": GRAMMARS["json"],
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "logit_bias": {30: 2.0},
        "min_tokens": 20,
    },
}
TEMPERATURES = (0.0, 1.0)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return load_tokenizer(DEMO / "target").encode(CODE)


@pytest.fixture(scope="module")
def samplings(prompt: list[int]) -> list[Sampling]:
    return [
        sampling_of(SamplingParams(temperature=t, max_tokens=TOKENS, **case), 5, 0, frozenset({EOS}), len(prompt))
        for case in CASES.values()
        for t in TEMPERATURES
    ]


@pytest.fixture(scope="module")
def plain(prompt: list[int], samplings: list[Sampling]) -> dict[Sampling, list[int]]:
    """Return plain decoding's tokens by sampling, one request at a time."""
    engine = InProcessEngine(DEMO / "target", 1, NgramDrafter(4, 1), slots=512)

    def decoded(sampling: Sampling) -> list[int]:
        request = engine.submit(prompt, sampling, TOKENS, Autoregressive())
        engine.run()
        return tokens_of(request)

    answers = {sampling: decoded(sampling) for sampling in samplings}
    unprocessed = [decoded(Sampling(seed=5, temperature=t)) for t in TEMPERATURES]
    assert all(answer not in unprocessed for answer in answers.values()), "each of them changes something"
    return answers


SAMPLE_OF: Final = 13
"""A strategy or drafter is tried with every thirteenth case, each beginning with another one, so that the strategies
try all cases; `make test-all` tries all with each."""
SAMPLED_OR_ALL: Final = [SAMPLE_OF, pytest.param(1, marks=pytest.mark.whole)]


@pytest.mark.parametrize("every", SAMPLED_OR_ALL)
def test_every_strategy_gives_the_tokens_of_plain_decoding(
    every: int, prompt: list[int], plain: dict[Sampling, list[int]]
) -> None:
    engine = InProcessEngine(DEMO / "target", 3, DEMO / "draft", slots=4096)
    for make in range(len(strategies(3))):
        made = {s: strategies(3)[make] for s in [*plain][make % every :: every]}
        requests = {s: submit_with(strategy, engine, prompt, s, TOKENS) for s, strategy in made.items()}
        engine.run()
        for sampling, request in requests.items():
            assert tokens_of(request) == plain[sampling], (made[sampling], sampling)
        accepted = sum(request.metrics.accepted for request in requests.values())
        assert make == 0 or accepted > 0, "nothing was speculated"


METHODS: Final = ("ngram", "synthetic", "eagle3", "medusa", "spd", "early_exit")


@pytest.mark.parametrize("every", SAMPLED_OR_ALL)
@pytest.mark.parametrize("method", METHODS)
def test_every_drafter_gives_the_tokens_of_plain_decoding(
    method: str, every: int, prompt: list[int], plain: dict[Sampling, list[int]]
) -> None:
    """Among them are drafters that know nothing of a request's processors and draft nodes that a grammar forbids."""

    def answer(request: Request) -> list[int]:
        return plain[request.sampling]

    others: dict[str, Drafter] = {
        "ngram": NgramDrafter(4, 1),
        "synthetic": SyntheticDrafter([0.5, 0.7, 0.8], 4096, 1, answer),
    }
    learned = None if method in others else DEMO_DRAFTERS / method
    engine = InProcessEngine(DEMO / "target", 2, others.get(method), slots=4096, learned=learned)
    accepted = 0
    tried = [*plain.items()][METHODS.index(method) % every :: every]
    for i, (sampling, expected) in enumerate(tried):  # one after the other: alone, a request is drafted for
        two = PipeDec(2, 4, 4), Continuous(width=8, children=4)
        request = engine.submit(prompt, sampling, TOKENS, two[i // 2 % 2])
        engine.run()
        assert tokens_of(request) == expected, sampling
        accepted += request.metrics.accepted
    assert accepted > len(tried)


def test_the_repetition_penalty_is_that_of_transformers_generate(prompt: list[int]) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32)
    engine = InProcessEngine(DEMO / "target", 3, DEMO / "draft")
    for factor in (1.1, 1.5, 0.8):
        sampling = Sampling(repetition_penalty=factor, prompt_length=len(prompt))
        request = engine.submit(prompt, sampling, 24, PipeDec(3, 4, 4))
        engine.run()
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None, repetition_penalty=factor
        )
        assert check_same(model, prompt, tokens_of(request), expected[0, len(prompt) :].tolist())


# ------------------------------------------------------------------------------------------------- over stage processes


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """An engine whose draft model has no tokenizer beside it."""
    draft = tmp_path_factory.mktemp("draft")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(DEMO / "draft" / name, draft)
    speculation = {"method": "draft_model", "model": str(draft), "strategy": "static_tree", "tree_size": 12}
    with LLM(pipeline_parallel_size=2, speculative_config=speculation) as llm:
        yield llm


@pytest.mark.parametrize("temperature", [1.0, pytest.param(0.0, marks=pytest.mark.whole)])
def test_an_output_is_json_that_fits_its_schema(llm: LLM, temperature: float) -> None:
    for prompt in ("row = ", "# the settings of the server\nsettings = "):
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=64, structured_outputs=GRAMMARS["json"])
        (expected,) = decode(llm, [prompt], [params], None)[0].outputs
        llm.generate(prompt, params)  # the drafter compiles the grammar meanwhile, and may come too late to draft
        llm.loop.drain()
        (completion,) = llm.generate(prompt, params)[0].outputs
        assert completion.token_ids == expected.token_ids
        found = json.loads(completion.text)
        assert found.keys() == {"name", "size", "kind", "done"}
        assert len(found["name"]) <= 8
        assert found["size"] in range(100)
        assert found["kind"] in ("list", "dict", "set")
        assert isinstance(found["done"], bool)
        assert completion.finish_reason == "stop"
        assert completion.metrics.accepted > 0


EXHAUSTED: Final = StructuredOutputsParams(regex="[a-z ]{20}(a{1000}){1000}")
"""A grammar whose first tokens are cheap."""
EXHAUSTION: Final = r"structured_outputs\.regex: after \d+ tokens (it is exhausted, .*lexer error|the grammar's steps)"


@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=pytest.mark.whole)])
def test_an_exhausted_grammar_ends_its_request_with_an_error_and_no_other(llm: LLM, temperature: float) -> None:
    """With speculation and without. Drafted rows spend its time, too, so that it may end earlier with them."""
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=64, structured_outputs=EXHAUSTED)
    good = SamplingParams(temperature=temperature, seed=1, max_tokens=64, structured_outputs=GRAMMARS["json"])
    (expected,) = llm.generate("row = ", good)[0].outputs
    for speculation in (None, PLAIN, None):
        jobs = [llm.job("row = ", one, speculation=speculation) for one in (params, good)]
        with pytest.raises(RequestError) as raised:
            llm.complete(jobs)
        assert re.match(EXHAUSTION, str(raised.value))
        (failed,), (went_on,) = (job.completions for job in jobs)
        assert failed.output.finish_reason == "error"
        assert went_on.output.token_ids == expected.token_ids
    llm.loop.drain()
    llm.loop.audit()


def test_a_grammar_that_is_too_dear_is_refused_before_it_starts(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, structured_outputs=StructuredOutputsParams(regex="(a{1000}){1000}"))
    for _ in range(2):
        with pytest.raises(RequestError, match=r"^structured_outputs\.regex: it is exhausted"):
            llm.generate("x", params)


def test_a_complete_text_ends_before_min_tokens(llm: LLM) -> None:
    structure = StructuredOutputsParams(choice=["yes", "no"])
    params = SamplingParams(temperature=0, max_tokens=20, min_tokens=10, structured_outputs=structure)
    (completion,) = llm.generate("x", params)[0].outputs
    assert completion.text in ("yes", "no")
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize(
    ("params", "complaint"),
    [
        ({"logit_bias": {4096: 1.0}}, "logit_bias holds 4096; the model's token ids are 0 to 4095"),
        ({"allowed_token_ids": [5, 4096]}, "allowed_token_ids holds 4096"),
        ({"structured_outputs": StructuredOutputsParams(regex="a(b")}, r"structured_outputs\.regex: (?s:.*)unclosed"),
    ],
)
def test_what_this_model_cannot_be_asked_is_refused_before_it_starts(
    llm: LLM, params: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(RequestError, match=complaint):
        llm.generate("x", SamplingParams(**params))
    assert not llm.loop.busy


def test_grammars_need_a_tokenizer_and_an_end(tmp_path: Path) -> None:
    params = SamplingParams(structured_outputs=GRAMMARS["json"])
    options = {"speculative_config": None}
    with (
        LLM("demo", skip_tokenizer_init=True, **options) as llm,
        pytest.raises(RequestError, match="needs a tokenizer"),
    ):
        llm.generate({"prompt_token_ids": [5]}, params)
    endless = make_checkpoint(tmp_path, "llama", tokenizer=True, eos_token_id=None)
    with LLM(str(endless), max_model_len=64, **options) as llm, pytest.raises(RequestError, match="names no EOS token"):
        llm.generate({"prompt_token_ids": [5]}, params)
