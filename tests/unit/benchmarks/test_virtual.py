"""Real models under a virtual clock, and the tables that are measured with them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import results
from benchmarks.drafters import spd_chats
from benchmarks.papers import flowspec, flowspec_eagle, pp_eagle_table, six_sets, spd_tables
from benchmarks.sections import spd
from benchmarks.sections.base import paragraphs, rendered
from benchmarks.shared import measured, virtual
from benchmarks.shared.paired import paired, unpaired
from benchmarks.shared.simulations import said
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.cluster import draft_link, draft_timing, link_timings, load_cluster, stage_timings
from penstock.core import ConfigError, SamplingParams
from penstock.lab.bench.summary import StrategyRun
from penstock.lab.grid import PLAIN, Question, Setting
from tests import speculators
from tests.checkpoints import make_checkpoint

CHAIN, TREE = "pipedec[width=1,children=1]", "static_tree[tree_size=3,tree_depth=3,children=1]"
SMALL = virtual.Sizes(prompts=2, tokens=8)


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder for figures, with none in it."""
    monkeypatch.setattr(measured, "MEASURED", tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), "llama")


def compared(target: Path, drafter: dict[str, Any]) -> list[StrategyRun]:
    prompts = [{"prompt_token_ids": [5, 7, 11, 13, 2]}, {"prompt_token_ids": [3, 3, 9]}]
    questions = [
        Question(Setting("ids", temperature), i, prompt, SamplingParams(seed=i, temperature=temperature, max_tokens=24))
        for temperature in (0.0, 1.0)
        for i, prompt in enumerate(prompts)
    ]
    cluster, options = virtual.in_lockstep("spd-4"), {"model": target, "skip_tokenizer_init": True}
    return virtual.compared(cluster, drafter, [CHAIN, TREE], questions, **options)


@pytest.mark.parametrize(
    "method",
    ["draft_model", *(pytest.param(one, marks=pytest.mark.whole) for one in (["eagle3", "ngram"], "eagle3"))],
)
def test_runs_of_real_models_repeat_and_take_the_modelled_time_alone(
    target: Path, method: str | list[str], tmp_path: Path
) -> None:
    model = target if method == "draft_model" else speculators.eagle3(open_checkpoint(str(target))).save(tmp_path)
    drafter = {"method": method, "model": str(model)}
    runs, again = compared(target, drafter), compared(target, drafter)
    assert [run.as_dict() for run in runs] == [run.as_dict() for run in again]
    assert [run.strategy for run in runs] == [PLAIN, CHAIN, TREE] * 2
    for run in runs:
        assert run.identical_to_autoregressive
        assert run.equivalent_acceptance_length is not None
        # Links and drafts take a hundredth of a stage's time, so that speed is what the count of steps says.
        assert run.wall_clock_speedup == pytest.approx(run.equivalent_acceptance_length, rel=0.05)
    if method == "draft_model":  # the target drafts for itself: every draft is right
        assert [run.equivalent_acceptance_length for run in runs if run.strategy == CHAIN] == pytest.approx([4, 4], 0.2)


def test_in_lockstep_nothing_but_the_stages_takes_time() -> None:
    cluster = virtual.in_lockstep("spd-16")
    assert {timing.seconds(rows) for timing in stage_timings(cluster) for rows in (1, 64)} == {0.001}
    drafting, link = draft_timing(cluster), draft_link(cluster)
    assert drafting is not None
    assert link is not None
    assert drafting.seconds(64) + 2 * link.seconds(64) < 0.02 * 0.001
    assert max(one.seconds(64) for one in link_timings(cluster)) < 1e-7


def test_what_is_stored_with_the_same_sizes_is_not_measured_again(empty: Path) -> None:
    taken = []

    def measure() -> dict[str, Any]:
        taken.append(len(taken))
        return {"value": len(taken)}

    assert virtual.once("one", "a", SMALL, "first", measure)["value"] == 1
    assert virtual.once("one", "a", SMALL, "second", measure)["value"] == 1
    assert virtual.once("one", "b", SMALL, "second", measure)["value"] == 2
    assert virtual.once("one", "a", virtual.Sizes(3, 8), "third", measure)["value"] == 3
    assert measured.stored("one").commands == ["first", "second", "third"]
    assert measured.stored("one").figures["b"] == {"prompts": 2, "tokens": 8, "value": 2}


def test_drafters_that_are_not_there_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = SimpleNamespace(spd=[str(tmp_path), str(tmp_path / "none")], early_exit=[])
    found = virtual.drafters_of(options, ["spd", "early_exit"])  # type: ignore[arg-type]
    assert found == {"spd": [str(tmp_path)], "early_exit": []}
    said = capsys.readouterr().out
    assert f"missing: {tmp_path / 'none'} is no folder; penstock train spd makes one" in said
    assert "left out: early_exit; name its folder with --early-exit" in said
    command = virtual.command_of("python -m benchmarks.papers.x", found, SMALL)
    assert command == f"python -m benchmarks.papers.x --spd {tmp_path.name} --prompts 2 --tokens 8", (
        "no path of this machine"
    )


def test_a_script_measures_what_is_not_stored_and_names_itself_in_an_error(
    empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, taken = tmp_path / "drafter", []
    folder.mkdir()

    def measure(key: str, folder: str) -> dict[str, Any]:
        taken.append((key, folder))
        if key == "bad":
            raise ConfigError("no such cluster")
        return {"value": len(taken)}

    def cases(wanted: virtual.Wanted) -> Iterator[virtual.Case]:
        assert wanted.sizes == virtual.Sizes(prompts=6, tokens=8), "the script's own default, and what was given"
        for key in wanted.options.keys:
            yield key, partial(measure, key, wanted.drafters["spd"][0])

    def run(*keys: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["one.py", *keys, "--spd", str(folder), "--tokens", "8"])
        file, sizes = str(tmp_path / "papers" / "one.py"), virtual.Sizes(6, 24)
        virtual.main(file, cases, ["spd"], how="By hand", sizes=sizes, keys={"nargs": "+"})
        return capsys.readouterr().out.splitlines()

    assert run("a") == ["a: prompts 6, tokens 8, value 1"]
    assert run("a", "b")[1:] == ["b: prompts 6, tokens 8, value 2"]
    assert taken == [("a", str(folder)), ("b", str(folder))]
    assert measured.stored("one").how == "By hand"
    assert measured.stored("one").commands == ["python -m benchmarks.papers.one --spd drafter --prompts 6 --tokens 8"]
    with pytest.raises(SystemExit, match="one: error: no such cluster"):
        run("bad")


# ------------------------------------------------------------------------------------------------------------------ SPD


def a_speculator(**fields: Any) -> Any:
    return SimpleNamespace(**{"kind": "spd", "stages": None, "reads": (0, 4, 8, 16), "depth": 2, **fields})


@pytest.mark.parametrize(
    ("speculator", "stages", "fits"),
    [
        (a_speculator(), 16, True),
        (a_speculator(stages=4), 4, True),
        (a_speculator(stages=4), 8, False),
        (a_speculator(kind="early_exit", reads=(4,)), 4, True),
        (a_speculator(kind="early_exit", reads=(4,)), 8, False),
    ],
)
def test_a_drafter_is_measured_where_it_is_the_papers(speculator: Any, stages: int, fits: bool) -> None:
    assert (spd_tables.unfit(speculator, stages, 16 // stages) is None) is fits


def test_a_folder_gives_a_row_and_one_with_output_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spd_tables, "open_speculator", lambda folder, target: a_speculator())
    rows = list(spd_tables.methods("spd", "folder", 8, SimpleNamespace(num_layers=16)))  # type: ignore[arg-type]
    assert [row.key for row in rows] == ["spd n=8 Ls=2", "spd n=8 Ls=2 output states"]
    assert rows[1].drafter == {"method": "spd", "model": "folder", "post_state": True}
    assert rows[0].entries == {1: CHAIN, 4: "pipedec[width=4,children=4]"}
    eagle = spd_tables.Method("eagle3", 4, 1, {})
    assert eagle.entries == {1: TREE, 4: "static_tree[tree_size=12,tree_depth=3,children=4]"}


def a_row(method: str, stages: int, layers: int, output_states: bool = False, identical: bool = True) -> dict[str, Any]:
    one = {"length": 1.5, "theoretical": 1.25, "preset": 1.125, "bounds": [1.0, 1.3], "identical": identical}
    return {
        "prompts": 2,
        "tokens": 8,
        "method": method,
        "stages": stages,
        "layers": layers,
        "output_states": output_states,
        "cells": {name: dict(one) for name in spd.CELLS},
    }


def section(page: str, name: str, figures: Any) -> str:
    return paragraphs(*rendered(page, name, results.SECTIONS[name], figures))


def test_ours_stand_below_the_papers() -> None:
    rows = [("spd", 8, 3), ("spd", 8, 2), ("early_exit", 16, 1), ("spd", 4, 2, True)]
    figures = {spd_tables.key_of(*row): a_row(*row) for row in rows}
    for one in figures[spd_tables.key_of("spd", 8, 2)]["cells"].values():
        one["theoretical"] = one["length"]
    lines = section("spd", spd_tables.NAME, figures).splitlines()
    at = {line.split(" | ")[0].lstrip("| "): i for i, line in enumerate(lines) if line.startswith("| ")}
    assert at["ours: SPD, n = 8, L_s = 2"] == at["paper: SPD, n = 8, L_s = 2"] + 1
    assert "| 2.72 (3.77) | 2.49 (3.38) | 2.81 (3.88) | 3.28 (4.28) |" in lines[at["paper: SPD, n = 8, L_s = 2"]]
    assert "| **1.50** |" in lines[at["ours: SPD, n = 8, L_s = 2"]], "nothing waits"
    assert "| **1.50 / 1.25** |" in lines[at["ours: early exit (PPSD), n = 16, L_s = 1"]]
    assert "| **1.50 / 1.25** |" in lines[at["ours: SPD, n = 4, L_s = 2, output states"]]
    assert at["paper: SPD, n = 8, L_s = 2"] < at["ours: SPD, n = 8, L_s = 3"] < at["paper: SPD, n = 8, L_s = 4"]
    assert not any("EAGLE-3" in line for line in lines), "a method that is not measured has no rows"
    assert "All outputs identical" in " ".join(lines)
    figures |= {"spd n=16 Ls=2": a_row("spd", 16, 2, identical=False)}
    said = " ".join(section("spd", spd_tables.NAME, figures).split())
    assert "NOT identical to plain decoding: spd n=16 Ls=2" in said


def test_chats_stand_in_the_tables_of_their_sets() -> None:
    figures = {f"{name} spd n=4 Ls=2": chat_row("spd", 2) for name in spd_chats.SETS}
    figures["gsm8k early_exit n=4 Ls=1"] = chat_row("early_exit", 1)
    mt_bench, gsm8k = section("spd", spd_chats.NAME, figures).split("GSM8K:")
    assert (
        "| paper: SPD, n = 4, L_s = 2 | 1.86 | 1.74 | 1.96 | 2.23 |\n"
        "| ours: SPD, n = 4, L_s = 2 | **1.50** (1.50-1.50) |" in mt_bench
    )
    assert "| paper: SPD, n = 4, L_s = 2 | 2.25 | 2.06 | 2.35 | 2.45 |" in gsm8k
    assert "ours: early exit" not in mt_bench
    assert "| ours: early exit (PPSD), n = 4, L_s = 1 | **1.50** (1.50-1.50) |" in gsm8k
    assert "n = 8" not in gsm8k, "the paper's rows are those of our numbers of stages"
    assert "All outputs identical" in gsm8k


def chat_row(method: str, layers: int) -> dict[str, Any]:
    row = a_row(method, 4, layers)
    more = {"theoretical": 1.5, "tokens": 9, "lengths": [1.5, 1.5]}
    row["cells"] = {name: one | more for name, one in row["cells"].items()}
    return row


@given(*2 * [st.lists(st.integers(1, 1000), min_size=2, max_size=8, unique=True)])
def test_independent_samples_have_the_ratio_of_their_means_with_bounds_whichever_is_the_base(
    own: list[int], base: list[int]
) -> None:
    ratio, other = unpaired(own, base), unpaired(base, own)
    assert ratio.bounds is not None
    assert other.bounds is not None
    assert ratio.mean == pytest.approx(geometric_mean(own) / geometric_mean(base))
    assert ratio.bounds == pytest.approx([1 / other.bounds[1], 1 / other.bounds[0]])
    assert ratio.bounds[0] < ratio.mean < ratio.bounds[1]


def test_chats_are_asked_behind_the_template(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def template(messages: list[dict[str, str]]) -> list[int]:
        return [ord(letter) for one in messages for letter in f"{one['role']}: {one['content']}"]

    (tmp_path / "gsm8k.jsonl").write_text(json.dumps({"turns": ["How many?", "And now?"]}), encoding="utf-8")
    tokenizer = SimpleNamespace(apply_chat_template=template)
    monkeypatch.setattr(spd_chats, "load_tokenizer", lambda path: tokenizer)
    asked = spd_chats.chats(SimpleNamespace(path=tmp_path), tmp_path, "gsm8k", SMALL)  # type: ignore[arg-type]
    assert [(one.setting.temperature, one.params.top_k) for one in asked] == [(0.0, 50), (1.0, 50)]
    assert {bytes(one.prompt["prompt_token_ids"]) for one in asked} == {b"user: How many?"}  # type: ignore[index]


# --------------------------------------------------------------------------------------------------------- other tables


@pytest.mark.parametrize("stages", pp_eagle_table.SIZES)
def test_the_reports_machine_drafts_on_the_last_stages_gpu(stages: int) -> None:
    cluster = pp_eagle_table.cluster(stages)
    assert [stage.layers for stage in cluster.stages] == [(32 // stages,)] * stages
    assert cluster.drafter == cluster.engine == cluster.stages[-1].devices[0]
    assert len(cluster.devices) == stages


def test_latency_is_shown_beside_plain_decodings() -> None:
    one = {"AR": 0.5, "AL": 2.5, "TP": 100.0, "Lat": 0.5, "identical": True}
    entries = {PLAIN: {**one, "AR": None, "Lat": 2.0}, pp_eagle_table.CHAIN: one, "auto": one}
    figures = {"eagle3 pp=2": {"prompts": 2, "tokens": 8, "method": "eagle3", "stages": 2, "entries": entries}}
    page = section("vllm", pp_eagle_table.NAME, figures)
    assert "| ours: none | 2 | NA | NA | NA | 2.0000 | 1.00 |" in page
    assert "| ours: eagle3, chain of 5 | 2 | 0.5000 | 2.5000 | NA | 0.5000 | 0.25 |" in page
    assert "| paper: eagle3 | 4 | 0.6498 | 4.4070 | 14,802.28 | 1.1989 | 0.29 |" in page


def test_six_sets_are_over_each_papers_base_with_bounds_over_prompts_whose_seeds_count_as_one() -> None:
    def case(name: str, seed: int) -> dict[str, Any]:
        one = {"tokens": 8, "mean_acceptance_length": 2.0, "identical": True}
        entries = {PLAIN: 4.0, flowspec.NAIVE: 3.0, "flowspec": 2.0 - 0.5 * seed}
        told = {entry: {**one, "seconds": [seconds, 2 * seconds]} for entry, seconds in entries.items()}
        stated = {"cluster": "flowspec-7b", "method": "ngram", "set": name, "temperature": 1.0, "seed": seed}
        return {"prompts": 2, "tokens": 8, **stated, "replayed": bool(seed), "entries": told}

    figures = {f"{name}, {seed}": case(name, seed) for name, seed in (("gsm8k", 0), ("gsm8k", 1), ("qa", 0))}
    page = section("strategies", six_sets.NAME, figures)
    ratio = six_sets.speed_up([figures["gsm8k, 0"], figures["gsm8k, 1"]], "flowspec", flowspec.NAIVE)
    assert (ratio.pairs, round(ratio.mean, 4)) == (2, round((1.5 * 2.0) ** 0.5, 4))
    row = "| `flowspec-7b` | `ngram` | 1 (1 to 2 seeds) | `flowspec` | "
    (line,) = [line for line in page.splitlines() if line.startswith(row)]
    assert line.removeprefix(row).split(" | ")[1:] == ["-", said(ratio), "-", "-", "1.50x (1.50 to 1.50)", "- |"]
    assert "All outputs are identical to plain decoding's. In 1 of 3 cases" in " ".join(page.split())
    figures["gsm8k, 1"]["entries"]["flowspec"]["identical"] = False
    assert "All outputs are identical" in " ".join(section("strategies", six_sets.NAME, figures).split())
    figures["gsm8k, 0"]["entries"]["flowspec"]["identical"] = False
    assert "NOT all outputs are identical" in " ".join(section("strategies", six_sets.NAME, figures).split())


def test_flowspecs_tables_are_there_for_eagle_too() -> None:
    def runs(cluster: str) -> list[dict[str, Any]]:
        one = {"cluster": cluster, "ms_per_token": 50.0, "mean_acceptance_length": 5.0, "identical": True}
        return [
            {**one, "strategy": strategy, "seconds": [place + 1.0, 2.0]}
            for place, strategy in enumerate(flowspec_eagle.STRATEGIES)
        ]

    figures = {
        f"{method}, {name}": {"prompts": 2, "tokens": 8, "method": method, "T0": runs(name), "T1": runs(name)}
        for method in flowspec_eagle.METHODS
        for name in flowspec.CLUSTERS.values()
    }
    page = section("flowspec", flowspec_eagle.NAME, figures)
    assert page.count("ours: EAGLE-2") == page.count("ours: EAGLE-3") == 4
    assert "EAGLE-2, T = 1 | EAGLE-3, T = 0" in page
    places = [flowspec_eagle.STRATEGIES.index(strategy) + 1.0 for strategy in (flowspec.PIPEDEC, "flowspec")]
    assert said(paired([places[0], 2.0], [places[1], 2.0])) in page


def test_a_section_comes_into_the_page_with_its_figures(empty: Path) -> None:
    assert not set(results.AWAITED) & set(results.shown())
    measured.store(spd_tables.NAME, virtual.HOW, (["python -m benchmarks.papers.spd_tables"], {}))
    assert spd_tables.NAME in results.shown()
    assert results.title_of(spd_tables.NAME) == "SPD, Tables 1, 2 and 5"


def test_presets_are_there_for_every_number_of_stages() -> None:
    assert [len(load_cluster(f"spd-{stages}").stages) for stages in spd_tables.STAGES] == list(spd_tables.STAGES)
