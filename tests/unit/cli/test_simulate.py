"""``penstock simulate``: what its flags come to, and what is refused."""

from __future__ import annotations

import pytest

from penstock.lab import simulate
from penstock.lab.simulate import SimulateOptions
from tests.unit.cli.invoke import invoke


def test_simulate_hands_its_flags_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SimulateOptions] = []
    monkeypatch.setattr(simulate, "run_simulate", seen.append)
    assert invoke("simulate", "--cluster", "demo").exit_code == 0
    assert seen.pop() == SimulateOptions(clusters=("demo",))
    flags = ["--cluster", "demo", "--cluster", "random-3", "--strategies", "auto, pipedec[width=4,children=2]"]
    flags += ["--accuracy", "0.5,0.7", "--tokens", "50", "--tokens-per-request", "10", "--sweep", "stages=2..8"]
    assert invoke("simulate", *flags).exit_code == 0
    assert (seen[0].clusters, seen[0].strategies) == (("demo", "random-3"), ("auto", "pipedec[width=4,children=2]"))
    assert (seen[0].accuracy, seen[0].tokens, seen[0].tokens_per_request) == ((0.5, 0.7), 50, 10)
    assert seen[0].sweep == {"stages": (2, 4, 8)}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--cluster", "dmo"], "did you mean 'demo'?"),
        (["--cluster", "local-2"], "cluster local-2 has no as_model"),
        (["--strategies", "pipdec"], "did you mean 'pipedec'?"),
        (["--strategies", "pipedec[widht=3]"], "did you mean 'width'?"),
        (["--accuracy", "0.9,0.5"], "none below the one before it"),
        (["--accuracy", "high"], "accuracy is 'high'; it has to be numbers with commas"),
        (["--block-size", "0"], "block_size is 0; it has to be above 0"),
        (["--tokens", "10"], "tokens is 10; it has to be at least tokens_per_request"),
        (["--sweep", "stagse=2..4"], "did you mean 'stages'?"),
        (["--sweep", "stages=2..6"], "doubling 2 does not lead to 6; end at 4 or 8"),
        (["--sweep", "segment=2..4"], "sweep is 'segment'; it has to be an option that one of static_tree, pipedec"),
        (["--cluster", "random-1", "--sweep", "stages=1..2"], "stages is 1; it has to be between 2 and 128"),
        (["--recording", "none.safetensors"], "none.safetensors: there is no such file"),
        (["--model", "demo"], "model is what recordings have to be made with, but there are none; add --recording"),
    ],
)
def test_simulate_refuses_what_it_cannot_simulate(flags: list[str], words: str) -> None:
    cluster = [] if "--cluster" in flags else ["--cluster", "demo"]
    result = invoke("simulate", *cluster, *flags)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
