import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.text.detokenizer import CONTEXT, UNFINISHED, IncrementalDetokenizer
from penstock.text.tokenizer import Tokenizer

every_tokenizer = settings(
    max_examples=settings().max_examples * 3 // 2,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
UNICODE = "Größe naïve 水車が回る Ω ≈ 3 € 🙂👩‍🔧 the thing"


def stream(detokenizer: IncrementalDetokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.append(token_id) for token_id in ids), detokenizer.finish()]


def whole(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool) -> str:
    """The completion's text, everything decoded at once. A character that the prompt left unfinished belongs to it."""
    before = tokenizer.decode(prompt, skip)
    audible = [token_id for token_id in prompt if not tokenizer.is_silent(token_id, skip)]
    in_byte_run = list(itertools.takewhile(lambda token_id: token_id in tokenizer.byte_ids, reversed(audible)))
    done = len(before)
    for _ in in_byte_run or [0]:
        done -= before[:done].endswith(UNFINISHED)
    return tokenizer.decode([*prompt, *ids], skip)[done:]


def cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character: the first stop string to be complete, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def token_ids(tokenizer: Tokenizer, data: st.DataObject, most: int) -> list[int]:
    """Any ids, past the vocabulary too, but also stretches of bytes, special tokens and encoded text."""
    size = len(tokenizer)
    part = st.one_of(
        st.lists(st.integers(0, size + 3), max_size=most),
        st.lists(st.integers(size - 3, size - 1), max_size=4),
        st.lists(st.sampled_from(sorted(tokenizer.byte_ids) or [5, 200]), max_size=most),
        st.text(alphabet=UNICODE, max_size=12).map(lambda text: tokenizer.encode(text, add_special_tokens=False)),
        st.text(max_size=6).map(lambda text: tokenizer.encode(text, add_special_tokens=False)),
    )
    return [token_id for ids in data.draw(st.lists(part, max_size=4)) for token_id in ids]


@every_tokenizer
@given(data=st.data(), skip=st.booleans())
def test_pieces_add_up_to_the_whole(tokenizer, data, skip):
    prompt, ids = token_ids(tokenizer, data, 12), token_ids(tokenizer, data, 40)
    pieces = stream(IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip), ids)
    assert "".join(pieces) == whole(tokenizer, prompt, ids, skip)


@every_tokenizer
@given(data=st.data(), include=st.booleans())
def test_stop_strings_cut_where_a_reader_would(tokenizer, data, include):
    ids = token_ids(tokenizer, data, 30)
    text = tokenizer.decode(ids)
    substring = st.tuples(st.integers(0, max(len(text) - 1, 0)), st.integers(1, 5)).map(
        lambda at: text[at[0] : sum(at)]
    )
    stops = [stop for stop in data.draw(st.lists(st.one_of(substring, st.text("the €\ufffd", max_size=4)))) if stop]
    detokenizer = IncrementalDetokenizer(tokenizer, stop=stops, include_stop_str_in_output=include)
    released = ""
    expected, found = cut(text, stops, include)
    for piece in stream(detokenizer, ids):
        released += piece
        assert expected.startswith(released)
    assert (released, detokenizer.stopped) == (expected, found)
    if found:
        assert detokenizer.append(ids[0]) == detokenizer.finish() == ""


@pytest.mark.parametrize("kind", ["bytes_tokenizer", "fallback_tokenizer"])
def test_never_gives_out_part_of_a_character(kind, request):
    tokenizer = request.getfixturevalue(kind)
    pieces = stream(IncrementalDetokenizer(tokenizer), tokenizer.encode(UNICODE, add_special_tokens=False))
    assert not any(UNFINISHED in piece for piece in pieces)
    assert "".join(pieces) == UNICODE
    assert sum(bool(piece) for piece in pieces) > 10


def test_a_character_cut_off_at_the_end_comes_with_finish(bytes_tokenizer):
    ids = bytes_tokenizer.encode("ab🦆", add_special_tokens=False)[:-1]
    pieces = stream(IncrementalDetokenizer(bytes_tokenizer), ids)
    assert "".join(pieces[:-1]) == "ab"
    assert pieces[-1] == UNFINISHED


def test_the_prompt_keeps_the_space_before_the_first_word(fallback_tokenizer):
    prompt, ids = fallback_tokenizer.encode("the"), fallback_tokenizer.encode("thing")
    assert "".join(stream(IncrementalDetokenizer(fallback_tokenizer, prompt), ids)) == " thing"
    assert "".join(stream(IncrementalDetokenizer(fallback_tokenizer), ids)) == "thing"


def test_a_prompt_that_ends_in_a_long_byte_run_is_not_repeated(fallback_tokenizer):
    prompt, ids = fallback_tokenizer.encode("🙂" * 20), fallback_tokenizer.encode("🙂 the")
    assert "".join(stream(IncrementalDetokenizer(fallback_tokenizer, prompt), ids)) == " 🙂 the"


def test_stops_at_once_and_holds_back_only_what_may_begin_a_stop(bytes_tokenizer):
    ids = [token_id for text in "xabay" for token_id in bytes_tokenizer.encode(text, add_special_tokens=False)]
    detokenizer = IncrementalDetokenizer(bytes_tokenizer, stop=["abb", "bay", "zz"])
    assert [detokenizer.append(token_id) for token_id in ids] == ["x", "", "", "a", ""]
    assert detokenizer.stopped == "bay"
    assert detokenizer.finish() == ""


def test_text_of_the_first_min_tokens_is_not_searched(bytes_tokenizer):
    ids = [token_id for text in "abab" for token_id in bytes_tokenizer.encode(text, add_special_tokens=False)]
    detokenizer = IncrementalDetokenizer(bytes_tokenizer, stop=["b"], min_tokens=2)
    assert "".join(stream(detokenizer, ids)) == "aba"
    assert detokenizer.stopped == "b"


@every_tokenizer
@given(data=st.data(), early=st.integers(0, 12))
def test_a_stop_string_ends_behind_the_first_min_tokens_and_may_begin_within(tokenizer, data, early):
    ids = token_ids(tokenizer, data, 30)
    text = tokenizer.decode(ids)
    substring = st.tuples(st.integers(0, max(len(text) - 1, 0)), st.integers(1, 8)).map(
        lambda at: text[at[0] : sum(at)]
    )
    stops = [stop for stop in data.draw(st.lists(substring)) if stop]
    plain = IncrementalDetokenizer(tokenizer)
    barred = len("".join([plain.append(token) for token in ids[:early]]))
    ends = [
        (at + len(stop), at, stop)
        for stop in stops
        for at in range(len(text))
        if text.startswith(stop, at) and at + len(stop) > barred
    ]
    expected, found = (text[: min(ends)[1]], min(ends)[2]) if ends else (text, None)
    detokenizer = IncrementalDetokenizer(tokenizer, stop=stops, min_tokens=early)
    assert ("".join(stream(detokenizer, ids)), detokenizer.stopped) == (expected, found)


@pytest.mark.parametrize("kind", ["text", "invalid bytes", "special tokens"])
def test_cost_per_token_does_not_grow(bytes_tokenizer, monkeypatch, kind):
    ids = {
        "text": bytes_tokenizer.encode(UNICODE, add_special_tokens=False) * 10,
        "invalid bytes": [bytes_tokenizer.encode("🙂", add_special_tokens=False)[0]] * 400,
        "special tokens": [bytes_tokenizer.eos_token_ids[0]] * 400,
    }[kind]
    decode, expected, lengths = bytes_tokenizer.decode, whole(bytes_tokenizer, ids, ids, True), []

    def counted(window: list[int], skip: bool) -> str:
        lengths.append(len(window))
        return decode(window, skip)

    monkeypatch.setattr(bytes_tokenizer, "decode", counted)
    assert "".join(stream(IncrementalDetokenizer(bytes_tokenizer, ids), ids)) == expected
    assert max(lengths) <= 2 * CONTEXT
