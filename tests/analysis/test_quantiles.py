"""Quantiles by hand: nearest-rank, plain and weighted, and interpolated."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tracer.state.metrics.quantiles import nearest_rank, weighted_quantiles


@pytest.mark.parametrize(
    ("share", "value"), [(0.0, 1.0), (0.25, 1.0), (0.26, 2.0), (0.5, 2.0), (0.95, 4.0), (1.0, 4.0)]
)
def test_the_nearest_rank_is_the_smallest_value_that_enough_do_not_exceed(
    share: float, value: float
) -> None:
    assert nearest_rank([3.0, 1.0, 4.0, 2.0], share) == value


def test_a_weight_counts_as_so_many_values() -> None:
    values, weights = np.array([5.0, 1.0, 3.0]), np.array([1.0, 2.0, 7.0])
    repeated = np.repeat(values, weights.astype(int))
    for share in (0.1, 0.2, 0.21, 0.5, 0.9, 0.91, 1.0):
        assert nearest_rank(values, share, weights) == nearest_rank(repeated, share)
    assert nearest_rank(values, 0.2, weights) == 1.0
    assert nearest_rank(values, 0.9, weights) == 3.0
    assert nearest_rank(values, 0.91, weights) == 5.0


def test_nothing_has_no_quantile() -> None:
    assert math.isnan(nearest_rank([], 0.5))
    assert math.isnan(nearest_rank(np.array([1.0]), 0.5, np.zeros(1)))
    assert np.isnan(weighted_quantiles(np.array([np.nan]), np.ones((2, 1)), (0.5,))).all()


def test_an_interpolated_quantile_lies_between_the_middles_of_weights() -> None:
    """Of 10 and 20 with equal weights the middles lie at 1/4 and 3/4; with three to one at 3/8 and
    7/8."""
    values, rows = np.array([20.0, np.nan, 10.0]), np.array([[1.0, 9.0, 1.0], [1.0, 9.0, 3.0]])
    found = weighted_quantiles(values, rows, (0.25, 0.5, 0.625, 0.99))
    assert found[:, 0].tolist() == pytest.approx([10.0, 15.0, 17.5, 20.0])
    assert found[:, 1].tolist() == pytest.approx([10.0, 12.5, 15.0, 20.0])
