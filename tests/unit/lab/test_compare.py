"""Two bench files side by side, and files that are none."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.core import ConfigError
from penstock.lab.bench.report import report_of
from penstock.lab.report import compare, indented, paired_ratio, ratio_of, read_bench
from tests.unit.lab.bench.runs import a_request, a_run


def write(path: Path, settings: dict[str, Any], **runs: list[float]) -> Path:
    """A bench file: by strategy the tokens/s of each request."""
    made = [
        a_run(name, speeds[0], requests=[a_request(i, speed) for i, speed in enumerate(speeds)])
        for name, speeds in runs.items()
    ]
    path.write_text(indented(report_of(settings, made, []).document))
    return path


def shown(first: Path, second: Path, width: int = 120) -> str:
    out = io.StringIO()
    compare(first, second, Console(file=out, width=width))
    return out.getvalue()


def test_ratios_are_paired_by_prompt_and_seed(tmp_path: Path) -> None:
    one = write(tmp_path / "a.json", {}, pipedec=[2.0, 4.0, 8.0])
    other = write(tmp_path / "b.json", {}, pipedec=[3.0, 7.0])
    ratio = ratio_of(read_bench(one).runs[0], read_bench(other).runs[0])
    assert ratio == paired_ratio([3.0 / 2.0, 7.0 / 4.0])


def test_settings_that_differ_and_runs_without_a_partner_are_named(tmp_path: Path) -> None:
    settings = {"cluster": "demo", "temperature": [0.0], "versions": {"torch": "2.1"}}
    one = write(tmp_path / "a.json", settings, autoregressive=[1.0, 1.0], static_tree=[2.0, 2.0])
    changed = {**settings, "cluster": "pipedec-7", "versions": {"torch": "2.2"}}
    other = write(tmp_path / "b.json", changed, autoregressive=[2.0, 2.0], pipedec=[5.0, 5.0])
    text = shown(one, other)
    assert "versions.torch" in text
    assert '  cluster: "demo" in A, "pipedec-7" in B\n' in text
    assert "temperature" not in text
    assert "2.000" in text
    assert "2.00-2.00" in text
    assert f"Only in {one}: chat, T = 0: static_tree" in text
    assert "chat, T = 0: pipedec" in text


def test_names_are_whole_in_a_narrow_terminal(tmp_path: Path) -> None:
    settings = {"model": "/a/long/path/to/a/folder/of/checkpoints/SmolLM2-135M-Instruct.Q4_1.gguf"}
    name = "static_tree[tree_size=8]"
    one = write(tmp_path / "a.json", settings, **{name: [1.0, 2.0]})
    other = write(tmp_path / "b.json", {}, **{name: [2.0, 2.0]})
    text = shown(one, other, width=60)
    assert settings["model"] in text
    assert name in text
    assert "Not shown in 60 columns: pairs." in text


def test_files_with_nothing_in_common_say_so(tmp_path: Path) -> None:
    one = write(tmp_path / "a.json", {}, pipedec=[1.0])
    other = write(tmp_path / "b.json", {}, static_tree=[1.0])
    assert "No setting and strategy is in both." in shown(one, other)


def test_the_same_file_differs_in_nothing(tmp_path: Path) -> None:
    one = write(tmp_path / "a.json", {"seed": 1}, autoregressive=[1.0, 2.0])
    text = shown(one, one)
    assert "none" in text
    assert "1.000" in text
    assert "Only in" not in text


def test_benches_without_a_common_request_have_no_ratio(tmp_path: Path) -> None:
    one = write(tmp_path / "a.json", {}, pipedec=[2.0])
    table = json.loads(one.read_text())
    table["runs"][0]["requests"][0]["prompt_sha256"] = "another"
    (tmp_path / "b.json").write_text(json.dumps(table))
    assert ratio_of(read_bench(one).runs[0], read_bench(tmp_path / "b.json").runs[0]) is None
    shown(one, tmp_path / "b.json")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "settings is missing"),
        ('{"settings": {}}', "runs is missing"),
        ('{"settings": {}, "runs": 3}', "runs has to be a list"),
        ('{"settings": [], "runs": []}', "settings has to be a table"),
        ('{"settings": {}, "runs": [3]}', "runs[0] is an integer (3); expected a table"),
        ('{"settings": {}, "runs": [{"strategy": "pipedec"}]}', "runs[0].prompt_set is missing"),
    ],
)
def test_a_file_that_is_none_is_refused_by_file_and_field(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(content)
    with pytest.raises(ConfigError) as refused:
        read_bench(file)
    assert str(refused.value).startswith(f"{file}: ")
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("temperature", "warm", "runs[0].temperature is a string"),
        ("requests", None, "runs[0].requests is nothing"),
        ("requests", [{"seed": 1}], "runs[0].requests[0].prompt_sha256 is missing"),
        ("requests", [3], "runs[0].requests[0] is an integer"),
    ],
)
def test_a_run_with_a_wrong_field_is_refused_by_its_path(tmp_path: Path, key: str, value: object, words: str) -> None:
    table = json.loads(write(tmp_path / "a.json", {}, pipedec=[1.0]).read_text())
    table["runs"][0][key] = value
    (tmp_path / "a.json").write_text(json.dumps(table))
    with pytest.raises(ConfigError) as refused:
        read_bench(tmp_path / "a.json")
    assert words in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read"):
        read_bench(tmp_path / "none.json")
