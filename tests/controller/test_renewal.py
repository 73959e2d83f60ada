"""What an engine sees when its group is suspended, begins anew, or is lost."""

from kvcoord.index.keys import block_page_keys
from kvcoord.protocol.local import Acquire, Acquired, Advance, Agree, Agreed, Failed, join_keys
from tests.controller.cluster import Cluster

KEYS = join_keys(block_page_keys([1, 2, 3]))


def silent(cluster: Cluster, rank: int, seconds: float) -> None:
    """Lets time pass while one rank says nothing."""
    worker = cluster.workers[rank]
    original, worker.tick = worker.tick, lambda now: []  # type: ignore[method-assign]
    for _ in range(int(seconds / 0.5)):
        cluster.pass_time(0.5)
    worker.tick = original  # type: ignore[method-assign]


def test_a_call_that_waits_for_a_lost_group_ends_with_the_cause() -> None:
    cluster = Cluster(2, 8, 8)
    cluster.advance()
    cluster.begin(0, Advance(1))
    waiting = cluster.begin(0, Advance(2))
    cluster.run()
    assert waiting not in cluster.answers[0]
    silent(cluster, 1, 70)
    answer = cluster.answers[0][waiting]
    assert isinstance(answer, Failed)
    assert answer.error == "GroupLost"
    later = cluster.begin(0, Acquire(KEYS))
    assert cluster.answers[0][later] == answer


def test_an_immediate_decision_without_the_group_is_an_abort_at_once() -> None:
    cluster = Cluster(2, 8, 8, lockstep=False)
    silent(cluster, 1, 5)
    number = cluster.begin(0, Agree("mine", yes=True))
    answer = cluster.answers[0][number]
    assert isinstance(answer, Agreed)
    assert str(answer.outcome) == "mine aborted (rank_lost, rank 1)"


def test_in_lockstep_a_rank_without_its_group_waits_for_the_next_epoch_to_decide() -> None:
    """It aborted for itself, for a reason of its own: the others took the group's, evicted and tried again."""
    cluster = Cluster(2, 8, 8)
    cluster.advance()
    silent(cluster, 1, 5)
    number = cluster.begin(0, Acquire(join_keys(block_page_keys(range(9)))))
    assert number not in cluster.answers[0]
    cluster.pass_time(0.5)
    cluster.pass_time(0.5)
    answer = cluster.answers[0][number]
    assert isinstance(answer, Acquired)
    assert str(answer.outcome) == "allocate/1/0 aborted (in_doubt, no rank)"


def test_a_rank_aborts_nothing_alone_that_commits_without_it() -> None:
    """Suspended, it answered ABORT for an operation of which it is no participant, and which the others committed."""
    cluster = Cluster(2, 8, 8, lockstep=False)
    silent(cluster, 1, 5)
    number = cluster.begin(0, Agree("theirs", yes=True, participants=0b10))
    assert number not in cluster.answers[0]


def test_an_engine_learns_that_its_group_began_anew_until_it_registers_again() -> None:
    cluster = Cluster(2, 8, 8)
    cluster.advance()
    lease = cluster.ask(Acquire(KEYS))[0][0]
    assert isinstance(lease, Acquired)
    cluster.restart(1)
    cluster.run()
    number = cluster.begin(0, Acquire(KEYS))
    answer = cluster.answers[0][number]
    assert isinstance(answer, Failed)
    assert answer.error == "GroupRenewed"
    cluster.workers[0].registered()
    cluster.step = 0
    cluster.advance()
    again = cluster.ask(Acquire(KEYS))
    assert [answer[0].device_pages for answer in again if isinstance(answer[0], Acquired)] == [0, 0]
