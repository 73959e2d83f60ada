"""Quantiles, ratios and budgets of the benchmarks."""

import pytest

from kvcoord.load.bench.result import Budget, Series, compare, distribution, over_time

LONG = Series("ours", [float(number) for number in range(1, 101)])


@pytest.mark.parametrize(("share", "micros"), [(0.5, 50.0), (0.99, 99.0), (1.0, 100.0), (0.001, 1.0)])
def test_a_quantile_is_the_smallest_time_that_so_many_do_not_exceed(share: float, micros: float) -> None:
    assert LONG.quantile(share) == micros


def test_a_quantile_does_not_depend_on_the_order_of_measuring() -> None:
    assert Series("ours", LONG.micros[::-1]).quantile(0.9) == LONG.quantile(0.9)


def test_a_ratio_is_ours_over_the_peers() -> None:
    row = compare("case", 4, Series("ours", [10.0]), Series("gloo", [40.0]))
    assert (row.ratio_p50, row.ratio_p99, row.budget, row.met) == (0.25, 0.25, "", None)
    assert (row.peer, row.peer_p50_us, row.p50_us) == ("gloo", 40.0, 10.0)


@pytest.mark.parametrize(
    ("budget", "met"),
    [
        (Budget(ratio_p50_max=0.25), True),
        (Budget(ratio_p50_max=0.2), False),
        (Budget(ratio_p50_max=0.25, ratio_p99_max=0.1), False),
        (Budget(p50_us_max=9.9), False),
        (Budget(p50_us_max=10.0), True),
    ],
)
def test_a_budget_is_met_only_when_all_its_limits_are(budget: Budget, met: bool) -> None:
    row = compare("case", 4, Series("ours", [10.0]), Series("gloo", [40.0]), budget)
    assert (row.met, row.budget) == (met, str(budget))


def test_a_budget_names_each_of_its_limits() -> None:
    assert str(Budget(ratio_p50_max=1 / 20, ratio_p99_max=0.1)) == "p50 <= 0.05 of peer, p99 <= 0.1 of peer"
    assert str(Budget(p50_us_max=10.0)) == "p50 <= 10 us"


def test_a_distribution_rises_to_one_at_the_longest_time() -> None:
    points = distribution(Series("ours", [float(number % 997) for number in range(5000)])).points
    assert points == sorted(points)
    assert points[-1] == (996.0, 1.0)
    assert len(points) < 300


def test_times_are_shown_in_the_order_in_which_they_were_measured() -> None:
    assert over_time(Series("ours", [3.0, 1.0, 2.0])).points == [(0.0, 3.0), (1.0, 1.0), (2.0, 2.0)]
