"""Learned drafters over a pipeline: plain decoding's tokens, and what the trainer's forward gives on the same text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock import LLM, SamplingParams
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.config import FieldError
from penstock.drafters.base import DraftRequest, SyntheticDrafter
from penstock.drafters.learned import FollowingDrafter
from penstock.drafters.spd import SpdDrafter
from penstock.engine.completion import Prompt
from penstock.lab.bench.comparison import decode
from penstock.messages import Features, Sampling
from penstock.models.speculators.block import Block, BlockStage
from penstock.models.speculators.eagle import EagleStage
from penstock.models.speculators.peagle import PeagleStage
from penstock.models.speculators.spd import SpdStage
from penstock.requests.request import Request
from penstock.stage.visibility import BatchView
from penstock.strategies.auto import Auto
from penstock.strategies.pipedec import PipeDec, StaticTree
from penstock.transport.addresses import LinkSecurity
from penstock.tree import Node
from tests import speculators
from tests.checkpoints import VOCAB, make_checkpoint, make_wrapper
from tests.engines import InProcessEngine
from tests.exactness import (
    PLAIN,
    PROFILE,
    PROMPTS,
    TOKENS,
    check_same,
    some_strategies,
    strategies,
    submit_with,
    tokens_of,
)
from tests.generated import generate
from tests.gguf_drafters import of_draft
from tests.links import host_of
from tests.unit.models import blocks_reference
from tests.unit.models import speculators_reference as reference

CASES = [("eagle", 3), ("medusa", 3), ("anchored_dflash", 5)]
CASES += [("eagle3", 3), ("eagle3", 5), ("dflash", 3)]
CASES += [("mtp", 3), ("speculators_eagle3", 3), ("eagle31", 3), ("vllm_medusa", 3), ("spd_paper", 3)]
CASES += [("spd", 3), ("spd", 8), ("early_exit", 1)]
CASES += [("sliding_dflash", 3), ("speculators_dflash", 3), ("jetspec", 3), ("dspark", 3)]
CASES += [("speculators_dspark", 3), ("dflash2", 3), ("speculators_dflash2", 5), ("headrace", 3)]
CASES += [("peagle", 3), ("speculators_peagle", 5), ("nemo_peagle", 1)]
FURTHER = [("eagle", 1), ("eagle", 5), ("medusa", 1), ("medusa", 5), ("anchored_dflash", 1), ("anchored_dflash", 3)]
FURTHER += [("headrace", 1), ("headrace", 5)]
FURTHER += [("eagle3", 1), ("dflash", 1), ("dflash", 5), ("spd", 1), ("spd", 5)]
FURTHER += [("early_exit", 3), ("early_exit", 5), ("early_exit", 8)]
"""The same kinds over other numbers of stages."""
WITH_EVERY = ("eagle3", 3)
WITH_SOME = (("spd", 3), ("dflash", 3))
WITH_EACH = (("eagle3", 5), *WITH_SOME)
"""Every strategy runs with a head, three with a module in the pipeline and with blocks, and one in each other case. One
case of each of these kinds is asked for every prompt with every sampling, so that requests share a prefix."""
VARIANTS = {"anchored_dflash", "speculators_eagle3", "eagle31", "vllm_medusa", "sliding_dflash", "speculators_dflash"}
VARIANTS |= {"jetspec", "speculators_dspark", "speculators_dflash2", "speculators_peagle", "nemo_peagle"}
"""Other layouts of kinds that are compared beside them. How each is read stands in test_blocks.py and
test_speculators.py; `make test-all` drafts with all of them."""
SAMPLINGS = (Sampling(), Sampling(seed=11, temperature=1.0, top_p=0.95))
Requests = Sequence[tuple[int, int]]
EACH: Requests = [*product(range(len(PROMPTS)), range(len(SAMPLINGS)))]
"""Every prompt with every sampling, as indices."""
CROSSED: Requests = [(0, 1), (1, 0)]
"""Each of both once."""
Asked = tuple[Sequence[int], Requests]
"""Strategies, by their number, and the requests that each of them is asked."""
EVERY = range(len(strategies(1)))
"""Indices of ``strategies``, plain decoding among them."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=8)


@pytest.mark.parametrize(
    ("kind", "stages", "asked"),
    [
        (*WITH_EVERY, (EVERY, CROSSED)),
        *(
            (*case, (some_strategies(number, 3 if case in WITH_SOME else 1), EACH if case in WITH_EACH else CROSSED))
            for number, case in enumerate(CASES)
            if case != WITH_EVERY and case[0] not in VARIANTS
        ),
        *(pytest.param(*case, (EVERY, EACH), id=f"{case}-all", marks=pytest.mark.whole) for case in (*CASES, *FURTHER)),
    ],
)
def test_every_strategy_gives_plain_decodings_tokens(
    target: Path, kind: str, stages: int, asked: Asked, tmp_path: Path
) -> None:
    folder = getattr(speculators, kind)(open_checkpoint(str(target))).save(tmp_path / kind)
    check_strategies(target, folder, stages, asked)


@pytest.mark.parametrize(
    "asked", [(some_strategies(2, 1), CROSSED), pytest.param((EVERY, EACH), marks=pytest.mark.whole)]
)
@pytest.mark.parametrize(("kind", "stages"), [("dflash2", 3), ("speculators_dspark", 1)])
def test_with_a_block_drafter_in_gguf_too(target: Path, kind: str, stages: int, asked: Asked, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(target))
    file = of_draft(getattr(speculators, kind)(checkpoint), checkpoint).save(tmp_path / "drafter.gguf")
    check_strategies(target, file, stages, asked)


@pytest.mark.parametrize(
    "asked", [(some_strategies(4, 1), CROSSED), pytest.param((EVERY, EACH), marks=pytest.mark.whole)]
)
@pytest.mark.parametrize(("architecture", "stages"), [("qwen3_5_moe", 3), ("glm4_moe", 3), ("deepseek_v3", 1)])
def test_with_the_head_that_a_checkpoint_ships_too(
    architecture: str, stages: int, asked: Asked, tmp_path: Path
) -> None:
    target = speculators.ship_mtp(make_checkpoint(tmp_path, architecture))
    check_strategies(target, target, stages, asked)


@cache
def plain_answers(target: Path) -> dict[tuple[int, int], list[int]]:
    """Plain decoding's tokens by prompt and sampling, without a drafter; greedy ones are those of ``generate``."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    engine = InProcessEngine(target, 1, SyntheticDrafter(PROFILE, VOCAB, 1, lambda request: []))
    found = {
        (i, j): submit_with(strategies(1)[PLAIN], engine, prompt, sampling)
        for i, prompt in enumerate(PROMPTS)
        for j, sampling in enumerate(SAMPLINGS)
    }
    engine.run()
    for i, prompt in enumerate(PROMPTS):
        assert check_same(model, prompt, tokens_of(found[i, 0]), generate(model, prompt, TOKENS))
    return {key: tokens_of(request) for key, request in found.items()}


def check_strategies(target: Path, drafter: Path, stages: int, asked: Asked) -> None:
    """Greedy and sampled tokens are those of plain decoding."""
    engine, (speculating, requests) = InProcessEngine(target, stages, learned=drafter), asked
    for which in speculating:
        begun = {(i, j): submit_with(strategies(stages)[which], engine, PROMPTS[i], SAMPLINGS[j]) for i, j in requests}
        engine.run()
        expected = plain_answers(target)
        assert {key: tokens_of(request) for key, request in begun.items()} == {key: expected[key] for key in requests}
        # of each request, but with ``auto``: it stops where the first drafts are wrong
        drafted = [request.metrics.drafted_nodes > 0 for request in begun.values()]
        assert which == PLAIN or any(drafted)
        assert which == PLAIN or isinstance(strategies(stages)[which], Auto) or all(drafted)


# Each kind of drafter, and each kind of link with several of them.
@pytest.mark.processes
@pytest.mark.parametrize(
    ("methods", "link"),
    [
        (["eagle3"], "tls"),
        pytest.param(["eagle3"], "ipc", marks=pytest.mark.whole),
        (["medusa"], "tcp"),
        (["spd"], "tls"),
        (["early_exit"], "tcp"),
        pytest.param(["dflash"], "tcp", marks=pytest.mark.whole),
        (["dflash", "ngram"], "ipc"),
        (["headrace"], "tcp"),
        (["peagle"], "ipc"),
    ],
)
def test_stage_processes_send_their_states_to_the_drafters(
    target: Path, security: LinkSecurity, methods: list[str], link: str, tmp_path: Path
) -> None:
    folder = getattr(speculators, methods[0])(open_checkpoint(str(target))).save(tmp_path / methods[0])
    # ``auto`` may find, in real time, that nothing is worth drafting for models that are so small.
    speculation = {"method": methods, "model": str(folder), "strategy": "continuous", "width": 12, "children": 4}
    prompts: list[Prompt] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    # Long enough for a drafter's first answer to come before the end on a busy host.
    params = [SamplingParams(temperature=t, seed=3, max_tokens=4 * TOKENS, ignore_eos=True) for t in (0.0, 1.0)]
    options = {"max_model_len": 128, "prefill_chunk": 8, "skip_tokenizer_init": True, "host": host_of(link, security)}
    with LLM(str(target), pipeline_parallel_size=3, speculative_config=speculation, **options) as llm:
        plain = decode(llm, prompts, params, None)
        for _ in range(2):
            for one, other in zip(llm.generate(prompts, params), plain, strict=True):
                assert one.outputs[0].token_ids == other.outputs[0].token_ids
                assert one.outputs[0].metrics.drafted_nodes > 0
        llm.loop.audit()


@pytest.mark.processes
def test_a_shipped_head_needs_only_its_methods_name(tmp_path: Path) -> None:
    """The target is a hybrid's text part, and the stages are processes."""
    target = speculators.ship_mtp(make_wrapper(tmp_path, "qwen3_5"))
    prompts: list[Prompt] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    params = [SamplingParams(temperature=t, seed=3, max_tokens=TOKENS, ignore_eos=True) for t in (0.0, 1.0)]
    options = {"max_model_len": 128, "prefill_chunk": 8, "skip_tokenizer_init": True}
    speculation = {"method": "mtp", "strategy": "continuous", "width": 12, "children": 4}
    with LLM(str(target), pipeline_parallel_size=2, speculative_config=speculation, **options) as llm:
        plain = decode(llm, prompts, params, None)
        for one, other in zip(llm.generate(prompts, params), plain, strict=True):
            assert one.outputs[0].token_ids == other.outputs[0].token_ids
            assert one.outputs[0].metrics.drafted_nodes > 0
        llm.loop.audit()


def test_a_target_that_ships_no_head_is_refused_before_anything_starts(target: Path) -> None:
    with pytest.raises(FieldError, match=r"method is 'mtp', but .* ships no MTP head"):
        LLM(str(target), speculative_config={"method": "mtp"}, skip_tokenizer_init=True)


def test_spds_module_for_another_pipeline_is_refused_before_anything_starts(target: Path, tmp_path: Path) -> None:
    folder = speculators.spd_paper(open_checkpoint(str(target))).save(tmp_path / "spd")
    speculation = {"method": "spd", "model": str(folder)}
    for more, options, message in (
        ({}, {"pipeline_parallel_size": 2}, "module for 3 stages, and there are 2: set pipeline_parallel_size to 3"),
        ({}, {"layer_split": "1,4,3"}, "reads state 3 of tokens that have passed 1 stages, .*: set layer_split"),
        ({"post_state": True}, {"pipeline_parallel_size": 3}, "post_state is True; the module .* trained for False"),
    ):
        with pytest.raises(FieldError, match=message):
            LLM(str(target), speculative_config={**speculation, **more}, skip_tokenizer_init=True, **options)


def test_a_drafter_of_another_kind_is_refused_before_anything_starts(target: Path, tmp_path: Path) -> None:
    folder = speculators.medusa(open_checkpoint(str(target))).save(tmp_path / "medusa")
    with pytest.raises(FieldError, match=r"speculative_config.method is 'eagle3', the checkpoint is of kind 'medusa'"):
        LLM(str(target), speculative_config={"method": "eagle3", "model": str(folder)}, skip_tokenizer_init=True)
    with pytest.raises(FieldError, match="model is missing: method 'eagle3' needs the drafter's folder"):
        LLM(str(target), speculative_config={"method": "eagle3"}, skip_tokenizer_init=True)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("stages", [1, 4])
def test_certain_rows_are_what_the_whole_text_gives_at_once(
    target: Path, stages: int, kind: str, tmp_path: Path
) -> None:
    """The module's outputs for a text that went through the pipeline, row by row, drafted and computed anew."""
    checkpoint = open_checkpoint(str(target))
    draft = getattr(speculators, kind)(checkpoint)
    engine = InProcessEngine(target, stages, learned=draft.save(tmp_path / kind))
    strategy = strategies(stages)[-2]
    request = engine.submit(PROMPTS[1], Sampling(), TOKENS, strategy)
    while len(request.committed) < len(PROMPTS[1]) + TOKENS - 4:
        engine.loop.step()
    stage, drafter = engine.reader, engine.drafter
    assert isinstance(stage, EagleStage)
    assert isinstance(drafter, FollowingDrafter)
    done = drafter._final[request.number]
    while drafter.busy:
        engine.loop.step()
    committed = request.committed[:done]
    tokens, slots = [node.token for node in committed], np.array([node.slot for node in committed])
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.inference_mode():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    layers = checkpoint.num_layers
    reads = (layers,) if kind == "eagle" else (2, layers // 2, layers - 3)
    features = stage.store.states(slots)[:-1]
    torch.testing.assert_close(features, torch.cat([states[k][0] for k in reads], dim=-1)[:-1], atol=1e-4, rtol=1e-3)
    embedding = draft.tensors.get("embed_tokens.weight", model.get_input_embeddings().weight.detach())
    expected = reference_outputs(kind, draft.tensors, embedding, tokens, features)
    torch.testing.assert_close(stage._own_SD[slots][1:], expected, atol=1e-5, rtol=1e-5)


def reference_outputs(
    kind: str, tensors: reference.Tensors, embedding: torch.Tensor, tokens: list[int], features: torch.Tensor
) -> torch.Tensor:
    """The formulas' outputs [N - 1, D]; the first token has none: it follows nothing and nobody attends to it."""
    count = len(tokens) - 1
    sees, positions = torch.ones(count, count).tril().bool(), torch.arange(count)
    if kind == "eagle":
        return reference.eagle(tensors, embedding, torch.tensor(tokens[1:]), features, positions, sees, 10000.0)
    fused = features @ tensors["fc.weight"].T
    return reference.eagle3(tensors, embedding, torch.tensor(tokens[1:]), fused, positions, sees, 10000.0)


@pytest.mark.parametrize("post_state", [False, True])
@pytest.mark.parametrize(
    ("kind", "layers"),
    [("spd", 1), pytest.param("spd_paper", 1, marks=pytest.mark.whole), ("spd_paper", 2), ("early_exit", 1)],
)
def test_an_asked_row_is_what_the_features_of_its_path_give(
    target: Path, kind: str, layers: int, post_state: bool, tmp_path: Path
) -> None:
    """Each token of an asked token's path counts at the depth that it then has (SPD, Eq. 2, 3)."""
    if post_state and kind != "spd":
        pytest.skip("the paper's module has one timing; the early exit knows no other")
    checkpoint = open_checkpoint(str(target))
    draft = getattr(speculators, kind)(checkpoint, **({} if kind == "early_exit" else {"layers": layers}))
    stages = 3
    engine = InProcessEngine(target, stages, learned=draft.save(tmp_path / kind), post_state=post_state)
    watch = SpdWatch(engine)
    for width in (1, 4):
        request = engine.submit(PROMPTS[1], Sampling(), TOKENS, PipeDec(stages, width, width))
        engine.run()
        assert request.produced == TOKENS
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    reads = engine.reader.module.levels
    embedding = model.get_input_embeddings().weight.detach()
    trained_for = stages if kind == "spd_paper" else None
    seen = set()
    states_of = states_along(model, ([node.token for node, _ in path] for path, _ in watch.asked))
    for path, found in watch.asked:
        tokens, levels = [node.token for node, _ in path], [level for _, level in path]
        states = states_of[tuple(tokens)]
        rows = []
        for i, (node, level) in enumerate(path):
            sent = {k: watch.states[node.id, k] for k in reads[level] if k}
            for k, state in sent.items():  # the right ones; floats differ where batches do, more with every layer
                assert (state - states[k][0, i]).norm() <= 1e-4 * state.norm()
            parts = [sent[k] if k else embedding[node.token] for k in reads[level]]
            rows.append(reference.spd_feature(draft.tensors, level, parts, trained_for))
        sees, positions = torch.ones(len(path), len(path)).tril().bool(), torch.arange(len(path))
        expected = reference.spd(draft.tensors, torch.stack(rows), levels, positions, sees, 10000.0, trained_for)
        torch.testing.assert_close(found, expected[-1], atol=1e-5, rtol=1e-5)
        seen.add(tuple(levels[post_state - stages - 1 :]))
    deepest = len(reads) - 1
    if kind != "early_exit":
        under_way = [levels for levels in seen if deepest not in levels[1:]]
        assert under_way, "the pipeline was full: every token under way had a depth of its own"
        assert len(seen) > 1, "and at other times it was not"


def states_along(model: Any, paths: Iterable[Sequence[int]]) -> dict[tuple[int, ...], tuple[torch.Tensor, ...]]:
    """transformers' hidden states along each path, from one pass for all paths that begin the same longer one."""
    found: dict[tuple[int, ...], tuple[torch.Tensor, ...]] = {}
    wanted = sorted({tuple(path) for path in paths}, key=len, reverse=True)
    passed: dict[tuple[int, ...], tuple[torch.Tensor, ...]] = {}
    for path in wanted:
        if path not in passed:
            with torch.inference_mode():
                states = model(torch.tensor([path]), output_hidden_states=True).hidden_states
            passed |= {path[:end]: states for end in range(1, len(path) + 1)}
        found[path] = passed[path]
    return found


TEXT = [(7 * i * i + 3) % 150 for i in range(45)]
"""A prompt of two whole blocks of the prefix cache, and more."""
SHORT = 8
"""Tokens of an answer to it, enough for all stages to have drafts in flight."""


@pytest.mark.parametrize("kind", ["dflash", "speculators_peagle"])
@pytest.mark.parametrize("stages", [1, 4])
def test_every_block_has_the_whole_text_before_its_root_as_context(
    target: Path, stages: int, kind: str, tmp_path: Path
) -> None:
    """The text's own states, of the layers that the file names, also where another request has left its prompt."""
    folder = getattr(speculators, kind)(open_checkpoint(str(target))).save(tmp_path / kind)
    engine = InProcessEngine(target, stages, learned=folder)
    watch = BlockWatch(engine)
    found = []
    for _ in range(2):
        request = engine.submit(TEXT, Sampling(), SHORT, strategies(stages)[-2])
        watch.request = request
        engine.run()
        found.append(tokens_of(request))
        watch.ended()
    assert found[0] == found[1]
    shown, contexts, rows = watch.shown, watch.contexts, watch.rows
    assert max(shown) > 1 or stages == 1, "tokens in flight are shown"
    assert min(contexts[0]) >= len(TEXT) - 1
    assert rows[1] < rows[0] - 16, "the second request's prompt has its context already"
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.inference_mode():
        states = model(torch.tensor([watch.tokens]), output_hidden_states=True).hidden_states
    wanted = torch.cat([states[k][0] for k in (2, 5, 7)], dim=-1)[watch.begins :][: len(watch.states)]
    torch.testing.assert_close(watch.states, wanted, atol=1e-4, rtol=1e-3)


class BlockWatch:
    """Notes, of every block, how many tokens are its context and how many are shown, and checks them by the text."""

    def __init__(self, engine: InProcessEngine) -> None:
        assert isinstance(engine.reader, BlockStage)
        self.request: Request | None = None
        self.begins = int(isinstance(engine.reader, PeagleStage))
        """The first token that is context: EAGLE's first one follows nothing."""
        self.shown: list[int] = []
        self.contexts: list[list[int]] = [[]]
        """Tokens of context of each block, by request."""
        self.rows: list[int] = [0]
        """Rows that gave context, by request."""
        self.tokens: list[int] = []
        self.states = torch.empty(0)
        self._stage = engine.reader
        self._block, self._forward = engine.reader._block, engine.reader.forward
        engine.reader._block = self.block  # type: ignore[method-assign]
        engine.reader.forward = self.forward  # type: ignore[method-assign]

    def forward(self, view: BatchView, hidden: None) -> torch.Tensor:
        assert view.levels is not None
        self.rows[-1] += int(view.levels.sum())
        return self._forward(view, hidden)

    def block(self, view: BatchView, row: int) -> Block:
        made = self._block(view, row)
        path = view.path(row).tolist()
        assert made.context_positions.tolist() == list(range(self.begins, made.position)), "the context has no hole"
        assert made.tokens.tolist() == path[made.position :], "the block shows what comes after it"
        self.shown.append(len(made.tokens))
        self.contexts[-1].append(made.position)
        self.tokens, self.states = path[: made.position], self._stage.store.states(made.context)
        return made

    def ended(self) -> None:
        """The request has ended, and another follows."""
        assert self.request is not None
        assert self.tokens == [node.token for node in self.request.committed[: len(self.tokens)]] or not self.tokens
        self.contexts.append([])
        self.rows.append(0)


@pytest.mark.parametrize("stages", [1, 4])
def test_a_pass_of_peagles_is_what_the_states_of_its_whole_path_give(target: Path, stages: int, tmp_path: Path) -> None:
    """Rows at depth 0 with the target's states, and masks behind, also where another request has left its prompt."""
    draft = speculators.speculators_peagle(open_checkpoint(str(target)))
    engine = InProcessEngine(target, stages, learned=draft.save(tmp_path / "peagle"))
    watches = []
    for _ in range(2):
        watches.append(PassWatch(engine))
        engine.submit(TEXT, Sampling(), SHORT, strategies(stages)[-2])
        engine.run()
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    t = {name: tensor.double().numpy() for name, tensor in draft.tensors.items()}
    assert stages == 1 or max(len(path) - first for path, first, _ in watches[0].passes) > 1, "tokens were in flight"
    for path, first, found in [watch.passes[at] for watch in watches for at in (0, len(watch.passes) // 2, -1)]:
        with torch.inference_mode():
            states = model(torch.tensor([path]), output_hidden_states=True).hidden_states
        known = torch.cat([states[k][0] for k in (2, 5, 7)], dim=-1).double().numpy()
        every = range(1, first + len(found))
        expected = blocks_reference.peagle(
            t,
            t["embed_tokens.weight"],
            [path[i] if i < len(path) else speculators.MASK for i in every],
            [known[i - 1] if i <= first else None for i in every],
            1,
            theta=10000.0,
            eps=1e-5,
            normed_residual=True,
        )
        np.testing.assert_allclose(found.numpy(), expected[first - 1 :], atol=1e-4, rtol=1e-3)


class PassWatch:
    """Notes, of every pass from now on, the tokens of its path, the position of its first row, and its rows' states."""

    def __init__(self, engine: InProcessEngine) -> None:
        assert isinstance(engine.reader, PeagleStage)
        self.passes: list[tuple[list[int], int, torch.Tensor]] = []
        self._paths: list[list[int]] = []
        self._block, self._states = engine.reader._block, engine.reader._states
        engine.reader._block = self.block  # type: ignore[method-assign]
        engine.reader._states = self.states  # type: ignore[method-assign]

    def block(self, view: BatchView, row: int) -> Block:
        self._paths.append(view.path(row).tolist())
        return self._block(view, row)

    def states(self, blocks: Sequence[Block], batch: BatchView) -> torch.Tensor:
        hidden = self._states(blocks, batch)
        for block, own in zip(blocks, hidden.split([block.rows for block in blocks]), strict=True):
            self.passes.append((self._paths.pop(0), block.position, own.clone()))
        return hidden


@pytest.mark.parametrize("kind", ["dflash", "dspark", "headrace", "dflash2", "peagle"])
def test_one_pass_drafts_a_tree_of_several_levels(target: Path, kind: str, tmp_path: Path) -> None:
    """No token of the tree has entered: its levels come from the root's block. Markov heads and selectors are told
    each node."""
    folder = getattr(speculators, kind)(open_checkpoint(str(target))).save(tmp_path / kind)
    blocks, messages = {}, {}
    for ahead in (0, None):
        engine = InProcessEngine(target, 3, learned=folder, ahead=ahead)
        watch = BlockWatch(engine)
        request = engine.submit(PROMPTS[1], Sampling(), TOKENS, StaticTree(12, 4, 3))
        engine.run()
        assert len(tokens_of(request)) == TOKENS
        blocks[ahead], messages[ahead] = len(watch.shown), engine.drafter._builder.next_stream
    assert blocks[None] < blocks[0] / 4
    assert (messages[None] < messages[0] / 3) == (kind not in ("dspark", "headrace", "dflash2"))


@pytest.mark.parametrize("stages", [1, 4])
def test_tokens_in_flight_are_read_as_far_as_they_have_got(target: Path, stages: int, tmp_path: Path) -> None:
    """Headrace's rows have the target's own states of the layers that their token has passed, and of no others."""
    folder = speculators.headrace(open_checkpoint(str(target))).save(tmp_path / "headrace")
    engine = InProcessEngine(target, stages, learned=folder)
    stage = engine.reader
    assert isinstance(stage, BlockStage)
    asked, make, partial = [], stage._block, stage._partial

    def block(view: BatchView, row: int) -> Block:
        made = make(view, row)
        asked.append((view.path(row).tolist(), made, []))
        return made

    def read(blocks: Sequence[Block]) -> torch.Tensor:
        found = partial(blocks)
        firsts = np.cumsum([0, *(one.rows for one in blocks)])
        for one, first in zip(blocks, firsts, strict=False):
            own = next(kept for _, made, kept in asked if made is one)
            own.append(found[first : first + one.rows].unflatten(1, (3, -1)).clone())
        return found

    stage._block, stage._partial = block, read  # type: ignore[method-assign]
    engine.submit(TEXT, Sampling(), SHORT, strategies(stages)[-2])
    engine.run()
    model, seen = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32), set()
    states_of = states_along(model, (path for path, _, _ in asked))
    for path, made, (found,) in asked:
        states = states_of[tuple(path)]
        shown = len(made.tokens)
        assert not found[shown:].any(), "masks have no states"
        for i in range(shown):
            there = [bool(state.any()) for state in found[i]]
            assert there == sorted(there, reverse=True), "a token passes its layers in their order"
            seen.add(sum(there))
            for k, state in enumerate(found[i][: sum(there)]):
                assert (state - states[(2, 5, 7)[k]][0, made.position + i]).norm() <= 1e-4 * state.norm()
    assert (seen <= {0, 3}) if stages == 1 else (seen >= {0, 1, 2})


class SpdWatch:
    """Notes, of every row that a drafter is asked about, the levels along its path and what came out for it."""

    def __init__(self, engine: InProcessEngine) -> None:
        assert isinstance(engine.drafter, SpdDrafter)
        assert isinstance(engine.reader, SpdStage)
        self.asked: list[tuple[list[tuple[Node, int]], torch.Tensor]] = []
        self.states: dict[tuple[int, int], torch.Tensor] = {}
        """Features by (node, layer)."""
        self._drafter = engine.drafter
        self._paths: dict[int, list[tuple[Node, int]]] = {}
        self._ask, self._forward, self._take = engine.drafter._rows, engine.reader.forward, engine.reader.add_features
        engine.reader.add_features = self.take  # type: ignore[method-assign]
        engine.drafter._rows = self.rows  # type: ignore[method-assign]
        engine.reader.forward = self.forward  # type: ignore[method-assign]

    def rows(self, ask: DraftRequest) -> list[Node]:
        found = self._ask(ask)
        computed, last = self._drafter._computed[ask.request.number], self._drafter._depths.last
        for node in ask.nodes:
            path, current = [], node
            while current is not None:
                path.append((current, computed[current.id][1]))
                top, current = current, current.parent
            committed = [(one, last) for one in ask.request.committed[: top.position]]
            self._paths[node.id] = [*committed, *reversed(path)]
        return found

    def take(self, features: Features, states: torch.Tensor) -> None:
        self._take(features, states)
        for row, node in enumerate(features.nodes):
            for layer, state in zip(features.layers, states[row].chunk(len(features.layers)), strict=True):
                self.states[node, layer] = state.clone()

    def forward(self, view: BatchView, hidden: None) -> torch.Tensor:
        output = self._forward(view, hidden)
        for row, node in enumerate(view.nodes.tolist()):
            if node in self._paths:
                assert view.levels is not None
                assert view.levels[row] == self._paths[node][-1][1]
                self.asked.append((self._paths.pop(node), output[row].clone()))
        return output
