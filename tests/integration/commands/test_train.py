"""``penstock train``: what it writes is loaded by everything else, a killed run goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from penstock import LLM, ConfigError, SamplingParams
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.cli.app import app
from penstock.config import FieldError
from penstock.lab.trainer import loop
from penstock.lab.trainer.loop import load_state
from penstock.lab.trainer.run import KINDS, run_train
from penstock.models.speculators.open import open_speculator
from tests.checkpoints import make_checkpoint
from tests.processes import free_port
from tests.training import LAYERS, TEMPLATE, exit_codes, killed_run, options, shared_run, write_lines, write_texts

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPT = "the dog sat on "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, "llama", num_hidden_layers=LAYERS, tokenizer=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))


LIKE_OTHERS = {"early-exit": "spd", "dflash": "headrace", "dspark": "headrace"}
"""Kinds whose trainer is that of another kind, with less of it."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(one, marks=[pytest.mark.whole] if one in LIKE_OTHERS else []) for one in KINDS],
)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind, one after the other: what is trained by one test's process is there for the next test."""
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def trained(model: Path, texts: Path, kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of this kind, trained for a while."""
    folder = tmp_path_factory.mktemp("trained") / kind
    run_train(options(kind, model, texts, folder, epochs=6, save_every=10))
    return folder


def test_it_learns(trained: Path, kind: str) -> None:
    content = torch.load(trained / "training" / "state.pt", weights_only=True)
    losses = [loss for _, loss, _, _ in json.loads(content["history"])]
    assert losses[-1] < 0.8 * losses[0]
    shares = [by_step[0][0] for _, _, by_step, _ in json.loads(content["history"])]
    assert shares[-1] > shares[0]


def test_the_drafter_opens_and_gives_plain_decodings_tokens(model: Path, trained: Path, kind: str) -> None:
    target, folder = open_checkpoint(str(model)), trained
    opened = KINDS[kind].files.open(folder, target)
    if kind == "draft":
        assert (opened.num_layers, opened.vocab_size) == (2, target.vocab_size)
    else:
        assert opened.kind == {"dflash": "jetspec"}.get(kind, kind.replace("-", "_"))
        assert opened.draft_vocab_size == (40 if kind in ("eagle3", "spd", "early-exit") else target.vocab_size)
    fresh = next((folder / "training").glob("fresh-*")) / KINDS[kind].files.file
    before, after = load_file(fresh), load_file(folder / KINDS[kind].files.file)
    same = {name for name in before if torch.equal(before[name].to(after[name].dtype), after[name])}
    assert same == ({"d2t", "t2d"} if kind == "eagle3" else set())
    assert set(after) - set(before) == ({"embed_tokens.weight"} if kind == "eagle" else set())
    assert {tensor.dtype for tensor in after.values()} <= {torch.float32, torch.int64, torch.bool}
    with LLM(str(model), speculative_config=None, max_model_len=128) as llm:
        expected = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    method = {"early-exit": "early_exit", "draft": "draft_model"}.get(kind, kind)
    strategy = "pipedec" if kind == "early-exit" else "static_tree"
    speculation = {"method": method, "model": str(folder), "strategy": strategy}
    with LLM(str(model), max_model_len=128, pipeline_parallel_size=2, speculative_config=speculation) as llm:
        output = llm.generate(PROMPT, GREEDY)[0].outputs[0]
    assert output.token_ids == expected
    assert output.metrics.drafted_nodes > 0


@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        ("eagle", ("step",)),
        ("spd", ("saving",)),
        *(
            pytest.param(kind, ("step", "saving"), id=kind, marks=pytest.mark.whole)
            for kind in ("eagle", "spd", "eagle3", "dspark", "headrace", "draft")
        ),
    ],
)
def test_a_killed_run_goes_on_to_the_same_weights(
    model: Path, texts: Path, tmp_path: Path, kind: str, kills: tuple[str, ...]
) -> None:
    """Killed before a random step, or while a state is written; eagle draws noise in every step, spd a pipeline,
    dspark blocks."""
    whole = run_train(options(kind, model, texts, tmp_path / "whole", save_every=2)).path
    at = random.randrange(3, load_steps(whole) - 1)  # behind the first state, from which the run goes on
    saved = at // 2 * 2
    places = {"step": at, "saving": saved + 2}
    for where in kills:
        given = (kind, model, texts, tmp_path / "killed", where, places[where])
        assert exit_codes(killed_run, given) == [-signal.SIGKILL]
        assert not (tmp_path / "killed" / "config.json").exists()
    assert load_steps(tmp_path / "killed") == saved
    resumed = run_train(options(kind, model, texts, tmp_path / "killed", save_every=2)).path
    weights = [load_file(folder / KINDS[kind].files.file) for folder in (whole, resumed)]
    assert weights[0].keys() == weights[1].keys()
    assert [name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])] == []
    histories = [json.loads(state_of(folder)["history"]) for folder in (whole, resumed)]
    assert histories[0] == histories[1]


SHARED = """
import sys
from pathlib import Path
from penstock.lab.trainer.run import run_train
from tests.training import options

kind, model, data, output = sys.argv[1:]
run_train(options(kind, Path(model), Path(data), Path(output), max_steps=6))
"""


def by_torchrun(kind: str, model: Path, texts: Path, output: Path) -> None:
    script = output.with_suffix(".py")
    script.write_text(SHARED)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    arguments = [kind, str(model), str(texts), str(output)]
    launched = subprocess.run([*launch, *arguments], capture_output=True, text=True, check=False, env=environment)
    assert launched.returncode == 0, launched.stderr


def by_its_variables(kind: str, model: Path, texts: Path, output: Path) -> None:
    port = free_port()
    assert exit_codes(shared_run, *((rank, 2, port, kind, model, texts, output) for rank in range(2))) == [0, 0]


@pytest.mark.parametrize(
    ("kind", "launch"),
    [
        ("eagle", by_its_variables),
        *(pytest.param(kind, by_torchrun, marks=pytest.mark.whole) for kind in ("eagle", "spd", "dspark", "headrace")),
    ],
)
def test_two_processes_share_each_step(
    model: Path, texts: Path, tmp_path: Path, kind: str, launch: Callable[[str, Path, Path, Path], None]
) -> None:
    """Each computes one of two parts; one process computes both, and comes to the same weights."""
    alone = run_train(options(kind, model, texts, tmp_path / "alone", max_steps=6, accumulate=2)).path
    launch(kind, model, texts, tmp_path / "shared")
    assert json.loads(str(state_of(tmp_path / "shared")["settings"]))["processes"] == 2
    file = KINDS[kind].files.file
    weights = [load_file(folder / file) for folder in (alone, tmp_path / "shared")]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, atol=1e-5, rtol=1e-4)


def state_of(folder: Path) -> dict[str, object]:
    content: dict[str, object] = torch.load(folder / "training" / "state.pt", weights_only=True)
    return content


def load_steps(folder: Path) -> int:
    """How far a run has come."""
    return load_state(folder / "training" / "state.pt", {}).step


def test_parts_and_bfloat16(model: Path, texts: Path, tmp_path: Path) -> None:
    """A step in two parts has the gradients of the whole one; autocast leaves the weights in float32."""
    whole, parts = (
        load_file(
            run_train(options("eagle3", model, texts, tmp_path / name, max_steps=2, accumulate=count)).path / FILE
        )
        for name, count in (("whole", 1), ("parts", 2))
    )
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, atol=1e-4, rtol=1e-3)
    run_train(options("eagle3", model, texts, tmp_path / "half", max_steps=2, dtype="bfloat16"))
    weights = state_of(tmp_path / "half")["weights"]
    assert isinstance(weights, dict)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


FILE = KINDS["eagle3"].files.file


def answered(llm: LLM, question: str, seed: int, **sampling: Any) -> str:
    """Return the target's answer to a single question."""
    ids = llm.get_tokenizer().apply_chat_template([{"role": "user", "content": question}])
    params = SamplingParams(seed=seed, max_tokens=64 - len(ids), **sampling)
    return llm.generate({"prompt_token_ids": ids}, params)[0].outputs[0].text


def test_answers_are_written_by_the_target_and_kept(model: Path, tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "2"}]
    more = [*asked, {"role": "user", "content": "three?"}, {"role": "assistant", "content": "3"}]
    data = write_lines(tmp_path / "chat.jsonl", {"messages": asked}, {"messages": more}, {"messages": asked[:2]})
    given = options("eagle3", model, data, tmp_path / "out", regenerate=True, max_steps=1)
    run_train(given)
    (file,) = (tmp_path / "out" / "training").glob("answers-*.jsonl")
    written = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    with LLM(str(model), speculative_config=None, max_model_len=64) as llm:
        first, second, third = (answered(llm, "two?", seed) for seed in range(3))
    assert written[0] == [asked[0], {"role": "assistant", "content": first}]
    assert written[2] == [asked[0], {"role": "assistant", "content": third}]
    assert [message["role"] for message in written[1]] == [message["role"] for message in more]
    assert written[1][1]["content"] == second
    file.write_text(file.read_text()[:-9])  # as a kill would leave it
    run_train(options("eagle3", model, data, tmp_path / "out", regenerate=True, max_steps=1))
    assert [json.loads(line)["messages"] for line in file.read_text().splitlines()] == written
    text = write_texts(tmp_path / "texts")
    with pytest.raises(ConfigError, match=r"00\.txt: is no conversation"):
        run_train(options("eagle3", model, text, tmp_path / "other", regenerate=True))


def test_the_target_writes_questions_and_answers(model: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"self_generate": 3, "temperatures": (0.0, 0.5), "max_steps": 1}
    run_train(options("eagle3", model, None, tmp_path / "out", **given))
    (questions,) = (tmp_path / "out" / "training").glob("questions-*.jsonl")
    (answers,) = (tmp_path / "out" / "training").glob("answers-*.jsonl")
    written = [json.loads(line)["messages"] for line in answers.read_text().splitlines()]
    attempts = [json.loads(line) for line in questions.read_text().splitlines()]
    assert len({user["content"] for user, _ in written}) == 3
    assert {user["content"] for user, _ in written} <= set(attempts)
    with LLM(str(model), speculative_config=None, max_model_len=64) as llm:
        for i, (user, assistant) in enumerate(written):
            assert assistant["content"] == answered(llm, user["content"], i, temperature=(0.0, 0.5)[i % 2])
    said, lines = answers.read_text(), questions.read_text()
    questions.write_text(lines[:-3])  # as a kill would leave it
    answers.unlink()
    run_train(options("eagle3", model, None, tmp_path / "out", **given))
    assert (answers.read_text(), questions.read_text()) == (said, lines)


def test_the_command_line_trains_and_refuses(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "TOKENS", 20)  # of each request that is simulated
    common = ["--data", str(texts), "--output", str(tmp_path / "out"), "--model", str(model), "--max-length", "64"]
    common += ["--batch-tokens", "256", "--max-steps", "2"]
    found = CliRunner().invoke(app, ["train", "medusa", *common, "--cluster", "demo"])
    assert found.exit_code == 0, found.output
    assert open_speculator(str(tmp_path / "out"), open_checkpoint(str(model))).kind == "medusa"
    said = "".join(found.output.split("\n"))
    assert "step 2 of 2: loss" in said
    assert "x plain decoding (simulated)" in said
    for name in ("loss", "acceptance", "positions"):
        assert (tmp_path / "out" / "training" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    refused = CliRunner().invoke(app, ["train", "medusa", *common, "--seed", "1"])
    assert refused.exit_code == 2
    assert "holds a run with seed 0, not seed 1; use another folder, or --restart" in refused.output
    again = CliRunner().invoke(app, ["train", "medusa", *common, "--seed", "1", "--restart"])
    assert again.exit_code == 0, again.output


def test_the_command_line_knows_each_kinds_own_options(model: Path, texts: Path, tmp_path: Path) -> None:
    common = ["--data", str(texts), "--model", str(model), "--max-length", "64", "--batch-tokens", "256"]
    common += ["--max-steps", "1", "--output", str(tmp_path / "out")]
    found = CliRunner().invoke(
        app, ["train", "spd", *common, "--stages", "2,3", "--anchors", "0,2", "--spec-layers", "2"]
    )
    assert found.exit_code == 0, found.output
    opened = open_speculator(str(tmp_path / "out"), open_checkpoint(str(model)))
    assert (opened.levels, opened.depth) == (((0,), (0, 2)), 2)
    assert (tmp_path / "out" / "training" / "levels.png").read_bytes().startswith(b"\x89PNG")
    assert "by level" in found.output
    refused = CliRunner().invoke(
        app, ["train", "spd", *common, "--stages", "2", "--anchors", "0,2", "--spec-layers", "2"]
    )
    assert "holds a run with stages [2, 3], not stages [2]" in "".join(refused.output.split("\n"))
    refused = CliRunner().invoke(app, ["train", "spd", *common, "--variant", "paper", "--stages", "x"])
    assert refused.exit_code == 2
    assert "stages is 'x'; it has to be a list of whole numbers" in refused.output


def test_what_cannot_work_is_refused_before_anything_starts(model: Path, texts: Path, tmp_path: Path) -> None:
    with pytest.raises(FieldError, match="cluster local-2 has no as_model"):
        run_train(options("eagle", model, texts, tmp_path / "out", cluster="local-2"))
    with pytest.raises(FieldError, match="draft_vocab_size is 1000; the target knows 259 tokens"):
        run_train(options("eagle3", model, texts, tmp_path / "out", draft_vocab_size=1000))
    with pytest.raises(FieldError, match="exit_layer is 5; the target has 4 layers"):
        run_train(options("early-exit", model, texts, tmp_path / "out", exit_layer=5))
    few = write_texts(tmp_path / "few", 3)
    with pytest.raises(ConfigError, match="data: 2 sequences are fewer than the 8 parts of one step"):
        run_train(options("eagle", model, few, tmp_path / "out", max_length=512, accumulate=8, batch_tokens=1 << 12))
    assert not list((tmp_path / "out" / "training").glob("states*"))
