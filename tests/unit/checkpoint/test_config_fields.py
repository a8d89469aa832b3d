"""Every field of a checkpoint's JSON files, changed: numbers as in transformers, or refused by name before a start."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.core import ConfigError
from penstock.models.loader import check_loads, quiet
from penstock.text.tokenizer import load_tokenizer
from tests.checkpoints import ARCHITECTURES, FURTHER, RECURRENT, UNUSUAL, make_checkpoint
from tests.relatives import RELATIVES
from tests.staged import Staged, chain_rows

IDS: Final = [5, 9, 13, 9, 5, 70, 31, 100, 4, 8, 77, 42]
FAMILIES: Final = (
    *("llama", "qwen3", "gemma2", "gemma3", "phi3", "mistral_window", "gpt_oss", "mixtral", "deepseek_v3", "olmo2"),
    *("granite", "glm4", "gpt_neox"),
)
OUT: Final = object()
"""Stands for a field that is taken out."""
OTHER_NAMES: Final = {
    **dict.fromkeys(("hidden_act", "hidden_activation"), ("gelu", "relu")),
    "rope_type": ("linear", "dynamic", "yarn", "llama3"),
    "model_type": ("llama", "gpt2"),
}
"""Values that other models have."""
CLOSE: Final = 2e-4
"""Between logits in float32 of two orders of summing."""
EVERY: Final = 24
"""One of so many changes is tried by ``make test``; ``make test-all`` tries all."""
Change = tuple[tuple[str, ...], Any]


def values(key: str, value: Any) -> Iterator[Any]:
    """Values that a field is changed to: nothing, another type, 0, below 0, twice as much, what other models have."""
    yield from (OUT, None, "x")
    if isinstance(value, bool):
        yield from (not value, 3)
    elif isinstance(value, int | float):
        yield from (0, -1, 2 * value or 2, 1.5)
    elif isinstance(value, str):
        yield from (3, *OTHER_NAMES.get(key, ()))
    elif isinstance(value, list):
        yield from (3, [], value + value, value[::-1], [0] * len(value))
    elif isinstance(value, dict):
        yield from (3, [], {})
    else:
        yield from (0, -1, 3, True, [], {}, 2.0)


def changes(table: Mapping[str, Any], where: tuple[str, ...] = ()) -> Iterator[Change]:
    for key, value in table.items():
        yield from (((*where, key), other) for other in values(key, value))
        if isinstance(value, dict):
            yield from changes(value, (*where, key))


def changed(table: dict[str, Any], change: Change) -> str:
    table = copy.deepcopy(table)
    path, value = change
    holder: Any = table
    for key in path[:-1]:
        holder = holder[key]
    if value is OUT:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return json.dumps(table)


def own(folder: Path) -> torch.Tensor:
    """Logits of a whole stage [N, V]. What is not refused before it starts must not be refused by it."""
    check_loads(open_checkpoint(str(folder)))
    try:
        stage = Staged(folder, 1, max_model_len=64)
        return stage.run(chain_rows(0, IDS, range(len(IDS))), range(len(IDS)), [0])
    except ConfigError as error:
        raise AssertionError(f"only the stage found out: {error}") from error


def reference(folder: Path) -> torch.Tensor:
    """Those of transformers, of a model whose weights are all from the file."""
    with quiet():
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([IDS])).logits[0]
    return found


def fault(folder: Path, field: str) -> str | None:
    """The problem with how a changed configuration is taken; None if there is none."""
    try:
        found = own(folder)
    except ConfigError as error:
        if field == "model_type" and re.search("architecture '|the checkpoint lacks|wrong shape", str(error)):
            return None  # another model, which these files do not hold
        return None if field in str(error) else f"refused without its name: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    try:
        wanted = reference(folder)
    except Exception as error:
        return f"accepted; transformers: {type(error).__name__}: {error}"
    return None if (found - wanted).abs().max() < CLOSE else f"logits differ by {(found - wanted).abs().max()}"


def walk(folder: Path, family: str, first: int, every: int) -> None:
    make_checkpoint(folder, family)
    file = folder / "config.json"
    table = json.loads(file.read_text())
    assert fault(folder, "") is None
    faults = []
    for change in islice(changes(table), first, None, every):
        file.write_text(changed(table, change))
        if (found := fault(folder, change[0][-1])) is not None:
            faults.append((".".join(change[0]), "taken out" if change[1] is OUT else change[1], found))
    assert faults == []


@pytest.mark.parametrize("family", FAMILIES)
def test_some_changes_of_a_configuration(tmp_path: Path, family: str) -> None:
    walk(tmp_path, family, FAMILIES.index(family) % EVERY, EVERY)


@pytest.mark.whole
@pytest.mark.parametrize("family", FAMILIES)
def test_every_change_of_a_configuration(tmp_path: Path, family: str) -> None:
    walk(tmp_path, family, 0, 1)


@pytest.mark.whole
def test_no_family_is_refused_for_a_sound_one(tmp_path: Path) -> None:
    """Rules about values and the trial of a router hold for every architecture that is made here."""
    for family in sorted({*ARCHITECTURES, *FURTHER, *UNUSUAL, *RECURRENT, *RELATIVES}):
        check_loads(open_checkpoint(str(make_checkpoint(tmp_path / family, family))))


# ---------------------------------------------------------------------------------------------------------- other files


GENERATION: Final[dict[str, Any]] = {
    "eos_token_id": [1, 2],
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
}


def test_every_change_of_the_generation_configuration(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    file = folder / "generation_config.json"
    read = 0
    for change in (((), OUT), *changes(GENERATION)):
        ((field,), value) = change if change[0] else (("eos_token_id",), GENERATION["eos_token_id"])
        file.write_text(changed(GENERATION, ((field,), value)))
        try:
            found = open_checkpoint(str(folder))
        except ConfigError as error:
            assert f"generation_config.json: {field} " in str(error)  # noqa: PT017
            continue
        read += 1
        wanted = GenerationConfig.from_pretrained(folder)
        ends = wanted.eos_token_id if isinstance(wanted.eos_token_id, list) else [wanted.eos_token_id]
        assert found.eos_token_ids == (tuple(ends) if wanted.eos_token_id not in (None, []) else (1,))
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
            greedy = wanted.do_sample is False and name != "repetition_penalty"
            stated = getattr(wanted, name)
            if not greedy and stated is not None:
                assert found.sampling_defaults[name] == stated, (field, value)
    assert read > 10


def test_every_change_of_the_tokenizers_configuration(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, tokenizer=True)
    file = folder / "tokenizer_config.json"
    table = {**json.loads(file.read_text()), "add_bos_token": True, "clean_up_tokenization_spaces": True}
    read = 0
    for change in changes(table):
        file.write_text(changed(table, change))
        try:
            found = load_tokenizer(folder)
        except ConfigError as error:
            assert "tokenizer" in str(error)  # noqa: PT017
            continue
        wanted = AutoTokenizer.from_pretrained(folder)
        read += 1
        text = "A text, </s> with <s>marks."
        assert found.encode(text) == wanted.encode(text), change
        assert (wanted.eos_token_id is None) or wanted.eos_token_id in found.eos_token_ids
    assert read > 10
