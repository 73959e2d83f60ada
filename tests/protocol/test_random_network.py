"""Some hundred short runs over a bad network. `random_run` says what is done and checked."""

import random

import pytest

from kvcoord.domain import OperationKind, Outcome
from kvcoord.protocol.messages import Vote
from tests.protocol.cluster import joined
from tests.protocol.random_run import Run

RUNS_EACH = 25


@pytest.mark.parametrize("first", range(0, 250, RUNS_EACH))
def test_ranks_agree_and_everything_ends_over_a_bad_network(first: int) -> None:
    for seed in range(first, first + RUNS_EACH):
        play(seed)


def test_without_faults_what_all_want_is_committed() -> None:
    for seed in range(30):
        dice = random.Random(seed)
        cluster = joined(dice.randint(1, 4))
        operations = [f"op{number}" for number in range(10)]
        for rank in cluster.ranks.values():
            for operation in dice.sample(operations, len(operations)):
                vote = Vote(operation, OperationKind.CUSTOM, True)
                cluster.perform(rank, rank.machine.vote(vote, cluster.now))
        dice.shuffle(cluster.wire)
        cluster.settle()
        for rank in cluster.ranks.values():
            assert rank.outcomes == dict.fromkeys(operations, (Outcome.COMMIT, None))


def play(seed: int) -> None:
    run = Run(seed)
    try:
        run.play()
        run.check()
    except Exception as error:
        error.add_note(f"seed {seed}:\n" + "\n".join(run.trace[-60:]))
        raise
