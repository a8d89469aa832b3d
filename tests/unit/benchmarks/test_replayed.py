"""Runs in virtual time whose target is replayed take the same times as those in which it computes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shared import virtual
from benchmarks.shared.replayed import REPLAYED
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.cluster import Cluster, load_cluster
from penstock.core import SamplingParams
from penstock.engine.options import DEMO
from penstock.lab.bench.summary import StrategyRun
from penstock.lab.grid import Question, Setting
from tests import speculators
from tests.checkpoints import make_checkpoint

SHIPPED = {"draft_model": "draft", "medusa": "drafters/medusa", "dspark": "drafters/dspark"}
"""Drafters of the demo target that know something of it, by their place beside it."""
ENTRIES = ["pipedec[width=4]", "auto"]


def check(cluster: Cluster, drafter: dict[str, Any], questions: Sequence[Question], **options: Any) -> None:
    """Every figure of every run is the same whether the target computes or is replayed."""
    computed, replayed = (
        virtual.compared(cluster, drafter, ENTRIES, questions, replayed=replayed, **options)
        for replayed in (False, True)
    )
    assert list(map(figures, replayed)) == list(map(figures, computed))
    for one, other in zip(replayed, computed, strict=True):
        # A request's number has a digit more after the texts were recorded, which is a byte of its messages.
        assert virtual.seconds(one) == pytest.approx(virtual.seconds(other), rel=1e-5)


def figures(run: StrategyRun) -> tuple[Any, ...]:
    return run.strategy, run.temperature, run.tokens, run.mean_acceptance_length, run.identical_to_autoregressive


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), "llama")


@pytest.mark.parametrize("method", sorted(REPLAYED))
def test_a_replayed_target_leaves_every_time_as_it_is(method: str, target: Path, tmp_path: Path) -> None:
    # The target drafts for itself and is always right, the random drafters never are.
    model: Path | None = target
    if method == "ngram":
        model = None
    elif method != "draft_model":
        read = {} if method == "medusa" else {"taps": (1, 3)}
        model = getattr(speculators, method)(open_checkpoint(str(target)), **read).save(tmp_path)
    drafter = {"method": method} | ({} if model is None else {"model": str(model)})
    params = SamplingParams(seed=1, temperature=1.0, max_tokens=10)
    question = Question(Setting("ids", 1.0), 0, {"prompt_token_ids": [5, 7, 11, 13, 2]}, params)
    check(load_cluster("spd-4"), drafter, [question], model=str(target), skip_tokenizer_init=True)


@pytest.mark.whole
@pytest.mark.parametrize("cluster", ["two-servers", "flowspec-7b"])
@pytest.mark.parametrize("method", sorted(SHIPPED))
def test_so_it_does_where_some_drafts_are_right(method: str, cluster: str) -> None:
    drafter = {"method": method, "model": str(DEMO / SHIPPED[method])}
    check(load_cluster(cluster), drafter, virtual.asked(virtual.Sizes(prompts=2, tokens=16)))
