"""Some hundred short runs over a bad network. `random_run` says what is done and checked."""

import pytest

from tests.protocol.random_run import Run

RUNS_EACH = 25


@pytest.mark.parametrize("first", range(0, 250, RUNS_EACH))
def test_ranks_agree_and_everything_ends_over_a_bad_network(first: int) -> None:
    for seed in range(first, first + RUNS_EACH):
        play(seed)


def test_without_faults_nothing_is_suspended_after_the_first_activation() -> None:
    for seed in range(20):
        run = Run(seed, faults=False)
        run.cluster.start()
        run.cluster.settle()
        run.play(100)
        assert not any("GroupSuspended" in line for line in run.trace), seed


def test_a_rank_that_learns_of_a_closed_round_before_its_own_frame_goes_on() -> None:
    """Its frame stayed open for ever, so that it could not take the step after the next one."""
    play(3883)


def play(seed: int) -> None:
    run = Run(seed)
    try:
        run.play()
        run.check()
    except Exception as error:
        error.add_note(f"seed {seed}:\n" + "\n".join(run.trace[-60:]))
        raise
