"""Scripts: what is drawn from a profile, and what is taken from a recording."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.lab.script import MISSED, profile_script, recording_script
from tests.recordings import make_recording

ACCURACY = (0.6, 0.8, 0.9)


def test_ranks_are_as_frequent_as_the_profile_says() -> None:
    script = profile_script(ACCURACY, 40, 500, seed=0)
    ranks = np.array(script.picks)
    for count, accuracy in enumerate(ACCURACY, 1):
        assert (ranks < count).mean() == pytest.approx(accuracy, abs=0.015)  # four standard errors
    assert set(ranks.flat) == {0, 1, 2, MISSED}


def test_a_profile_is_calibrated_node_by_node() -> None:
    """Where the drafter is surer than usual of its first candidate it is right more often."""
    script = profile_script(ACCURACY, 40, 500, seed=0)
    sure = np.exp([[script.pool[draft][0] for draft in drafts] for drafts in script.drafts])
    right = np.array(script.picks) == 0
    for low, high in ((0.3, 0.5), (0.5, 0.8), (0.8, 1.0)):
        inside = (sure >= low) & (sure <= high)
        assert right[inside].mean() == pytest.approx(sure[inside].mean(), abs=0.03)


def test_each_distance_from_what_was_shown_has_its_profile() -> None:
    profiles = ((0.3, 0.5, 0.6), (0.7, 0.8))
    script = profile_script(ACCURACY, 40, 500, seed=0, further=profiles)
    assert replace(script, further=()) == profile_script(ACCURACY, 40, 500, seed=0)
    for slot, profile in zip(script.further, profiles, strict=True):
        found = []
        for request, picks in enumerate(script.picks):
            for i, token in enumerate(picks):
                ids = [candidate for candidate, _ in slot.candidates(request, i, token)]
                assert len({*ids}) == len(ids) == len(profile)
                found.append(ids.index(token) if token in ids else MISSED)
        for count, accuracy in enumerate(profile, 1):
            assert (np.array(found) < count).mean() == pytest.approx(accuracy, abs=0.015)  # four standard errors


def test_a_token_that_is_easy_from_afar_is_easy_from_near_by() -> None:
    script = profile_script(ACCURACY, 40, 500, seed=0, further=((0.3, 0.5),))
    near, far = (np.array(ranks) == 0 for ranks in (script.picks, script.further[0].ranks))
    assert near[far].mean() > 0.95 > 0.6 > near[~far].mean()  # 0.6 each if they had nothing to do with each other


@pytest.mark.parametrize("persistence", [0.0, 0.5, 0.9])
def test_easy_tokens_come_in_stretches(persistence: float) -> None:
    """After a right draft the share of right ones lies as far above the mean as the confidence of one node says."""
    script = profile_script(ACCURACY, 100, 1000, seed=0, persistence=persistence)
    right = np.array(script.picks) == 0
    assert right.mean() == pytest.approx(ACCURACY[0], abs=0.02)
    sure = np.exp([chances[0] for chances in script.pool])
    alike = (sure**2).mean() / sure.mean()
    expected = persistence * alike + (1 - persistence) * ACCURACY[0]
    assert right[:, 1:][right[:, :-1]].mean() == pytest.approx(expected, abs=0.02)


def test_the_seed_decides() -> None:
    assert profile_script(ACCURACY, 2, 20, seed=1) == profile_script(ACCURACY, 2, 20, seed=1)
    assert profile_script(ACCURACY, 2, 20, seed=1).picks != profile_script(ACCURACY, 2, 20, seed=2).picks


def test_a_request_may_begin_again() -> None:
    script = profile_script(ACCURACY, 2, 20, seed=1, further=(ACCURACY,))
    more = script.with_again(1, 4)
    (slot,), (longer,) = script.further, more.further
    assert (longer.ranks[2], longer.drafts[2]) == (slot.ranks[1][:4], slot.drafts[1][:4])
    assert (more.picks[:2], more.picks[2]) == (script.picks, script.picks[1][:4])
    assert (more.drafts[2], len(more.prompts)) == (script.drafts[1][:4], 3)


def test_a_recordings_ranks_and_chances_come_back() -> None:
    recording = make_recording((5, 7))
    script = recording_script([(recording, 1), (recording, 0)], 6, "recorded")
    assert (script.prompts, script.tokens, script.label) == ((3, 3), 11, "recorded")
    rows = [*range(5, 11), *range(5)]
    picks = [rank for picks in script.picks for rank in picks]
    drafts = [script.pool[draft] for drafts in script.drafts for draft in drafts]
    for row, rank, chances in zip(rows, picks, drafts, strict=True):
        candidates = recording.candidates[row].tolist()
        if rank == MISSED:
            assert recording.tokens[row] not in candidates
        else:
            assert recording.tokens[row] == candidates[rank]
        assert chances == tuple(recording.chances[row].tolist()[: len(chances)])
        assert all(token < 0 for token in candidates[len(chances) :])
    assert any(rank != MISSED for rank in picks)


def test_the_target_goes_on_after_each_requests_own_prompt() -> None:
    script = profile_script((1.0,), 1, 3, seed=0, prompt=4)
    assert [script.after(0, position) for position in range(1, 8)] == [MISSED, MISSED, 0, 0, 0, MISSED, MISSED]
