import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from scipy import stats

from penstock import noise
from penstock.noise import gumbel

LARGEST_SEED = 2**63 - 1


def test_is_a_function_of_its_key_alone():
    values = gumbel(5, 0, 17, 100)
    assert values.dtype == np.float64
    assert values.shape == (100,)
    assert np.array_equal(values, noise.to_gumbel(noise.generate(5, 0, 17, 100)))
    assert np.array_equal(noise.draws(5, 0, 17, 100), noise.generate(5, 0, 17, 100))
    for other in [(6, 0, 17), (5, 1, 17), (5, 0, 18), (LARGEST_SEED, 0, 17)]:
        assert not np.isin(gumbel(*other, 100), values).any()


def test_does_not_change_between_versions():
    # Saved completions are reproducible by their seed only as long as these numbers stay.
    assert gumbel(LARGEST_SEED, 3, 7, 3) == pytest.approx([1.33403983, 1.81797623, 0.14102695], abs=1e-8)


@pytest.mark.parametrize("shorter", [1, 2, 3, 5, 100, 1023])
def test_a_shorter_vocabulary_sees_a_prefix(shorter):
    raw = noise.generate(1, 2, 3, 1024)
    assert np.array_equal(noise.generate(1, 2, 3, shorter), raw[:shorter])
    whole = noise.to_gumbel(raw)
    assert np.array_equal(gumbel(1, 2, 3, shorter), whole[:shorter])
    assert np.array_equal(gumbel(1, 2, 3, 1024), whole)
    assert np.array_equal(gumbel(1, 2, 3, shorter), whole[:shorter])


def test_cannot_be_written_to():
    for vocabulary in (8, 4):
        with pytest.raises(ValueError, match="read-only"):
            gumbel(1, 1, 1, vocabulary)[0] = 0
        with pytest.raises(ValueError, match="read-only"):
            noise.draws(1, 1, 1, vocabulary)[0] = 0


def test_a_tokens_noise_does_not_depend_on_the_tokens_it_is_computed_with():
    raw = noise.generate(3, 0, 4, 5000)
    whole, chosen = noise.to_gumbel(raw), np.random.default_rng(0).permutation(5000)
    for count in [*range(1, 20), 1000]:
        assert np.array_equal(noise.to_gumbel(raw[chosen[:count]]), whole[chosen[:count]])


def test_positions_do_not_overlap():
    values = np.concatenate([gumbel(1, 0, position, 5000) for position in [*range(40), 2**40, 2**63, 2**64 - 1]])
    assert len(np.unique(values)) == len(values)


def test_extreme_draws_stay_finite_where_float32_does_not():
    raw = np.array([0, 2**64 - 1], dtype=np.uint64)
    assert np.isfinite(noise.to_gumbel(raw)).all()
    in_float32 = (raw >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
    with np.errstate(divide="ignore"):
        assert -np.log(-np.log1p(-in_float32))[0] == np.inf


def test_is_gumbel_distributed():
    values = np.concatenate([gumbel(11, 0, position, 1000) for position in range(100)])
    assert stats.kstest(values, stats.gumbel_r.cdf).pvalue > 0.01
    assert stats.kstest(values * 1.05, stats.gumbel_r.cdf).pvalue < 1e-6


def test_positions_tokens_and_samples_are_uncorrelated():
    grid = np.array([[gumbel(11, sample, position, 200) for position in range(50)] for sample in range(10)])
    for axis in range(3):
        left, right = np.moveaxis(grid, axis, 0)[:-1].ravel(), np.moveaxis(grid, axis, 0)[1:].ravel()
        assert stats.pearsonr(left, right).pvalue > 0.01


def test_cache_forgets_the_least_recently_used():
    rows = noise._Rows(limit=2 * (80 + noise.ENTRY_BYTES), make=noise.generate)
    first = rows.get((1, 0, 0), 10)
    rows.get((1, 0, 1), 10)
    assert rows.get((1, 0, 0), 10).base is first
    rows.get((1, 0, 2), 10)
    assert list(rows._rows) == [(1, 0, 0), (1, 0, 2)]
    rows.get((1, 0, 0), 1000)
    assert list(rows._rows) == [(1, 0, 0)]
    assert rows.bytes == 8000 + noise.ENTRY_BYTES


def test_cache_is_safe_among_threads():
    rows = noise._Rows(limit=4 * (80 + noise.ENTRY_BYTES), make=noise.generate)
    expected = [noise.generate(1, 0, position, 10) for position in range(8)]

    def ask(turn: int) -> bool:
        return np.array_equal(rows.get((1, 0, turn % 8), 10), expected[turn % 8])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(2000)))
    assert rows.bytes == sum(row.nbytes + noise.ENTRY_BYTES for row in rows._rows.values()) <= rows.limit


def test_needs_no_torch():
    program = "import sys, penstock.noise; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
