import numpy as np
import pytest

from tests.statistics import chi_square_p_value


def test_agrees_with_the_textbook_value():
    # A die thrown 120 times: chi-square 5.0 with 5 degrees of freedom.
    assert chi_square_p_value(np.array([25, 17, 15, 23, 24, 16]), np.full(6, 1 / 6)) == pytest.approx(0.4159, abs=1e-4)


def test_pools_rare_outcomes_and_refuses_impossible_ones():
    probabilities = np.array([0.5, 0.49, 0.004, 0.003, 0.003])
    assert chi_square_p_value(np.array([500, 490, 4, 3, 3]), probabilities) == pytest.approx(1.0)
    assert chi_square_p_value(np.array([500, 440, 30, 20, 10]), probabilities) < 1e-9
    assert chi_square_p_value(np.array([9, 1, 0]), np.array([0.5, 0.5, 0.0])) > 0.001
    assert chi_square_p_value(np.array([500, 499, 1]), np.array([0.5, 0.5, 0.0])) == 0.0


def test_says_when_nothing_is_tested():
    with pytest.raises(ValueError, match="one cell"):
        chi_square_p_value(np.array([3, 2]), np.array([0.5, 0.5]))
    with pytest.raises(ValueError, match="sum to"):
        chi_square_p_value(np.array([30, 20]), np.array([0.5, 0.4]))
