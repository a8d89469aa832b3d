"""Drafters on other hosts: each kind in each place gives the tokens of plain decoding, and their loss costs none."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from penstock import LLM, ConfigError, RequestOutput, SamplingParams
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.drafters.base import DRAFTERS, Weights
from penstock.engine.profile.measure import drafter_bytes
from penstock.hosts.fetching import held_bytes
from penstock.speculation import SpeculativeConfig
from tests import speculators
from tests.checkpoints import make_checkpoint
from tests.conftest import noisy_copy
from tests.happening import AfterResults
from tests.warm import Place
from tests.workers import WarmWorker, Worker, ended, workers

pytestmark = pytest.mark.processes

PROMPTS: Final = ["def f(x):", "import os\n"]
PARAMS: Final = [SamplingParams(temperature=t, seed=3, max_tokens=24, ignore_eos=True) for t in (0.0, 1.0)]
LONG: Final = [replace(one, max_tokens=60) for one in PARAMS]
OPTIONS: Final[dict[str, Any]] = {"max_model_len": 256, "threads": 1}
LEARNED: Final = {
    "dflash": speculators.dflash,
    "dspark": speculators.dspark,
    "eagle": speculators.eagle,
    "eagle3": speculators.eagle3,
    "early_exit": speculators.early_exit,
    "headrace": speculators.headrace,
    "jetspec": speculators.jetspec,
    "medusa": speculators.medusa,
    "mtp": speculators.mtp,
    "peagle": speculators.peagle,
    "spd": speculators.spd,
}
NOT_WHOLE: Final = "early_exit"
"""A method that drafts only below tokens that have entered, and so no whole tree."""
GONE_S: Final = 10.0

Asked = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def hosts(keys: Path) -> Iterator[list[Worker]]:
    """Two for stages, and one for a drafter alone."""
    with workers(3, keys) as found:
        yield found


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of as many layers as learned drafters of ``tests/speculators.py`` read."""
    return make_checkpoint(tmp_path_factory.mktemp("deep"), num_hidden_layers=8, seed=2, tokenizer=True)


@pytest.fixture(scope="module")
def config_of(deep: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("drafters")
    draft = noisy_copy(deep, folder / "draft", noise=0.1)

    def found(method: str) -> dict[str, Any]:
        make = LEARNED.get(method)
        model = draft if make is None else folder / method
        if make is not None and not model.exists():
            make(open_checkpoint(str(deep))).save(model)
        # A round is drafted whole, and then looked at whole: what is right does not depend on anybody's speed.
        strategy = "continuous" if method == NOT_WHOLE else "static_tree"
        return {"method": method, "model": str(model), "strategy": strategy}

    return found


@pytest.fixture(scope="module")
def plain(deep: Path) -> Iterator[Callable[[list[SamplingParams]], list[list[int]]]]:
    with LLM(deep, **OPTIONS, speculative_config=None) as llm:
        yield lambda params: ids(llm.generate(PROMPTS, params))


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in outputs]


def accepted(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    """Trees, tokens that were drafted rightly, and those that were not drafted, of each answer."""
    return [(m.drafts, m.accepted, m.misses) for m in (one.outputs[0].metrics for one in outputs)]


def named(*found: Worker) -> str:
    return ",".join(one.host for one in found)


KINDS: Final = sorted(method for method in DRAFTERS if DRAFTERS[method].weights is not Weights.NONE)


def test_every_kind_with_weights_is_walked() -> None:
    assert set(KINDS) == {"draft_model", *LEARNED}


SAMPLE: Final = "draft_model"
"""On a host of its own and on the last stage's. A learned drafter is on its own and on the first stage's host in the
test of a cluster, and beside the engine in test_workers.py; every kind runs with the whole matrices."""


@pytest.mark.parametrize(
    ("number", "method"),
    [pytest.param(*one, marks=[pytest.mark.whole] * (one[1] != SAMPLE)) for one in enumerate(KINDS)],
)
def test_each_kind_in_each_place_gives_plain_decodings_tokens(
    deep: Path, hosts: list[Worker], keys: Path, config_of: Any, plain: Any, number: int, method: str
) -> None:
    """Every kind is on a host of its own, and in one of the other places, where as much is right as there."""
    config, expected = config_of(method), plain(PARAMS)
    places = {"first-stage": hosts[0], "last-stage": hosts[1], "engine": None, hosts[2].host: hosts[2]}
    right = []
    for place in (hosts[2].host, list(places)[number % 3]):
        options = {**OPTIONS, "hosts": named(*hosts[:2]), "keys": str(keys), "drafter_on": place}
        with LLM(deep, speculative_config=config, **options) as llm:
            outputs = llm.generate(PROMPTS, PARAMS)
            where = places[place]
            assert llm.setup.drafter_host == ("" if where is None else where.host)
            on_stages = [1 + (one is where) for one in hosts[:2]]
            assert [len(one.stages()) for one in hosts] == [*on_stages, int(where is hosts[2])]
        assert ids(outputs) == expected
        right.append(accepted(outputs))
    assert right[0] == right[1] or method == NOT_WHOLE
    assert all(drafts for drafts, _, _ in right[0])


def test_a_head_in_the_targets_own_checkpoint_may_be_elsewhere(hosts: list[Worker], keys: Path, tmp_path: Path) -> None:
    target = speculators.ship_mtp(make_checkpoint(tmp_path, "glm4_moe", tokenizer=True))
    config = {"method": "mtp", "strategy": "static_tree"}
    with LLM(target, **OPTIONS, speculative_config=None) as llm:
        expected = ids(llm.generate(PROMPTS, PARAMS))
    options = {**OPTIONS, "hosts": named(*hosts[:2]), "keys": str(keys), "drafter_on": hosts[1].host}
    with LLM(target, speculative_config=config, **options) as llm:
        assert ids(llm.generate(PROMPTS, PARAMS)) == expected
        assert len(hosts[1].stages()) == 2


def test_a_clusters_drafter_is_where_it_says(
    deep: Path, hosts: list[Worker], keys: Path, config_of: Any, plain: Any, tmp_path: Path
) -> None:
    file = tmp_path / "c.toml"
    devices = [f'[[devices]]\nname = "d{i}"\nhost = "{one.host}"\nthreads = 1\n' for i, one in enumerate(hosts)]
    stages = "".join(f'[[stages]]\ndevices = ["d{i}"]\n' for i in range(2))
    file.write_text(f'name = "c"\ndrafter = "d2"\n{"".join(devices)}{stages}')
    options = {"max_model_len": 256, "keys": str(keys), "speculative_config": config_of("eagle3")}
    with LLM(deep, cluster=str(file), **options) as llm:
        assert ids(llm.generate(PROMPTS, PARAMS)) == plain(PARAMS)
        assert [len(one.stages()) for one in hosts] == [1, 1, 1]
    with LLM(deep, cluster=str(file), drafter_on="first-stage", **options) as llm:
        assert ids(llm.generate(PROMPTS, PARAMS)) == plain(PARAMS)
        assert [len(one.stages()) for one in hosts] == [2, 1, 0]


# A process that dies is test_recovery.py's, on this host; a host that dies, below, takes the process with it.
@pytest.mark.whole
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_drafter_whose_process_dies_amid_answers_costs_none(
    deep: Path, hosts: list[Worker], keys: Path, config_of: Any, plain: Any, method: str
) -> None:
    options = {**OPTIONS, "hosts": named(*hosts[:2]), "keys": str(keys), "drafter_on": hosts[2].host}
    with LLM(deep, speculative_config=config_of(method), **options) as llm:
        (drafter,) = hosts[2].stages()
        with llm.observing(AfterResults(12, drafter.kill)):
            assert ids(llm.generate(PROMPTS, LONG)) == plain(LONG)
        assert ended([drafter], GONE_S)
        assert ids(llm.generate(PROMPTS, PARAMS)) == plain(PARAMS)
        assert len(hosts[2].stages()) == 1  # it has been started again


@pytest.mark.parametrize("method", ["draft_model", pytest.param("eagle3", marks=pytest.mark.whole)])
def test_a_drafter_whose_host_dies_amid_answers_drafts_again_when_it_is_back(
    deep: Path,
    hosts: list[Worker],
    keys: Path,
    config_of: Any,
    plain: Any,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("penstock.hosts.remote.TRY_AGAIN_S", 0.5)
    options = {**OPTIONS, "hosts": named(*hosts[:2]), "keys": str(keys), "speculative_config": config_of(method)}
    with (
        closing(WarmWorker("127.0.0.9:0", "--keys", str(keys))) as own,
        LLM(deep, drafter_on=own.host, **options) as llm,
    ):
        with llm.observing(AfterResults(12, own.kill)):
            assert ids(llm.generate(PROMPTS, LONG)) == plain(LONG)
        assert "prompt lookup drafts from now on in the drafter's place" in caplog.text
        with closing(WarmWorker(own.host, "--keys", str(keys))) as again:
            for _ in range(200):
                assert ids(llm.generate(PROMPTS, PARAMS)) == plain(PARAMS)
                if again.stages() and "is back: it drafts again" in caplog.text:
                    break
                time.sleep(0.1)  # it is back by the clock, not after so many answers
            assert "is back: it drafts again" in caplog.text
            assert accepted(llm.generate(PROMPTS, PARAMS))[0][0] > 0


def test_a_host_without_the_drafter_is_sent_what_it_loads(
    deep: Path, keys: Path, config_of: Any, plain: Any, tmp_path: Path
) -> None:
    """Empty file systems lie over both checkpoints there."""
    config, cache = config_of("eagle3"), tmp_path / "cache"
    place = Place(hidden=(str(deep), config["model"]))
    command = ("127.0.0.8:0", "--keys", str(keys), "--cache", str(cache))
    with (
        closing(WarmWorker(*command, place=place)) as own,
        LLM(deep, hosts="localhost", keys=str(keys), drafter_on=own.host, speculative_config=config, **OPTIONS) as llm,
    ):
        assert ids(llm.generate(PROMPTS, PARAMS)) == plain(PARAMS)
    sent = sorted(map(held_bytes, cache.iterdir()))
    assert len(sent) == 2  # the drafter as a whole, and of the target what is outside of its layers
    shutil.rmtree(cache)


def test_memory_counts_the_drafter(deep: Path, hosts: list[Worker], keys: Path, config_of: Any) -> None:
    options = {"hosts": named(*hosts[:2]), "keys": str(keys), "speculative_config": config_of("draft_model")}
    with pytest.raises(ConfigError, match=rf"host {hosts[2].host}: cpu has .* the drafter included"):
        LLM(deep, drafter_on=hosts[2].host, kv_slots=1 << 34, **options)
    assert [one.stages() for one in hosts] == [[], [], []]


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "medusa", "dflash", "headrace", "peagle"])
def test_what_is_reckoned_for_a_drafter_is_what_it_holds(deep: Path, config_of: Any, method: str) -> None:
    """Learned drafters take their slots with the first row, so that only their weights are there to compare."""
    with LLM(deep, speculative_config=config_of(method), **OPTIONS) as llm:
        (started,) = llm.loop.drafter.pipeline.started.values()  # type: ignore[union-attr]
        setup = llm.setup if method == "draft_model" else replace(llm.setup, kv_slots=0, speculative_slots=0)
        assert drafter_bytes(setup) == pytest.approx(started.weight_bytes + started.kv_bytes, rel=0.25)  # and scales


PLACES: Final = ("first-stage", "last-stage", "127.0.0.9:7700")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("method", sorted(set(DRAFTERS) - set(KINDS)))
def test_kinds_without_weights_are_refused_by_name(target: Path, method: str, place: str) -> None:
    config = {"method": method} if method == "ngram" else {"method": method, "accuracy": [0.5]}
    with pytest.raises(ConfigError, match=rf"drafter_on.*{place}.*{method}.* has no weights"):
        LLM(target, hosts="localhost,127.0.0.9:7701", drafter_on=place, speculative_config=config, insecure=True)


def test_other_places_that_mean_nothing_are_refused_by_name(target: Path, config_of: Any) -> None:
    config = SpeculativeConfig(**config_of("draft_model"))
    with pytest.raises(ConfigError, match=r"drafter_on.*Ray"):
        LLM(target, hosts="ray", pipeline_parallel_size=2, drafter_on="127.0.0.9:7700", speculative_config=config)
    with pytest.raises(ConfigError, match=r"drafter_on.*no device"):
        LLM(target, cluster="local-2", drafter_on="stage-9", speculative_config=config)
    with pytest.raises(ConfigError, match=r"drafter_on.*nothing drafts"):
        LLM(target, drafter_on="last-stage", speculative_config=None)
