"""When the pages of a lease or a load-back may be read: layer by layer, its own copy and those it shares."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcoord.client.progress import Landing, missing
from kvcoord.client.results import GrantedLease, layers_needed
from kvcoord.errors import PeerUnavailable, TransferFailed, UsageError
from kvcoord.protocol.local import Acquired, Failed, Release
from tests.client.rig import Probe, Rig
from tests.client.values import aborted, acquired


def lease_of(probe: Probe) -> GrantedLease:
    lease = probe.results[0]
    assert isinstance(lease, GrantedLease)
    return lease


def readable(probe: Probe, layers: int = 3) -> bool:
    return missing(lease_of(probe).landings, layers) is None


def loading(lease: int, error: str = "") -> Acquired:
    """A lease that loads two pages from the host."""
    return acquired(lease, host_pages=2, loaded=[(0, 2)], error=error)


def test_layers_are_readable_one_after_the_other_as_they_land() -> None:
    rig = Rig()
    probe = rig.acquire()
    rig.answer((1, loading(7)))
    assert not readable(probe, 1)
    rig.landed("load-back/7/0", 1)
    assert readable(probe, 1)
    assert not readable(probe, 2)
    rig.landed("load-back/7/0", 3)
    assert readable(probe)


def test_a_lease_that_loads_nothing_is_readable_at_once() -> None:
    rig = Rig()
    probe = rig.acquire()
    rig.answer((1, acquired(7, device_pages=2)))
    assert readable(probe)


def test_a_lease_asked_for_as_landed_is_readable_when_it_is_answered() -> None:
    rig = Rig()
    probe = rig.acquire(landed=True)
    rig.answer((1, loading(7)))
    assert readable(probe)
    assert lease_of(probe).error == ""


def test_a_copy_that_failed_before_the_answer_says_so() -> None:
    rig = Rig()
    probe = rig.acquire(landed=True)
    rig.answer((1, loading(7, error="copy_failed")))
    assert lease_of(probe)
    assert lease_of(probe).error == "copy_failed"
    with pytest.raises(TransferFailed, match="copy_failed"):
        readable(probe, 1)


def test_a_copy_that_fails_leaves_the_layers_before_readable() -> None:
    rig = Rig()
    probe = rig.acquire()
    rig.answer((1, loading(7)))
    rig.landed("load-back/7/0", 1)
    rig.landed("load-back/7/0", 1, "boom")
    assert readable(probe, 1)
    with pytest.raises(TransferFailed, match="layer 1: boom"):
        readable(probe, 2)
    assert lease_of(probe).error == "boom"


def test_a_layer_that_lands_before_the_answer_to_its_call_is_not_lost() -> None:
    rig = Rig()
    probe = rig.acquire()
    rig.landed("load-back/7/0", 1)
    rig.landed("load-back/7/0", 2)
    rig.answer((1, loading(7)))
    assert readable(probe, 2)
    assert not readable(probe, 3)


def test_a_copy_that_fails_before_the_answer_to_its_call_has_failed() -> None:
    rig = Rig()
    probe = rig.acquire()
    rig.landed("load-back/7/0", 0, "boom")
    rig.answer((1, loading(7)))
    with pytest.raises(TransferFailed):
        readable(probe, 1)


def test_reports_of_an_earlier_copy_of_that_name_are_forgotten() -> None:
    rig = Rig()
    probe = rig.acquire()
    rig.landed("load-back/8/0", 3)
    rig.answer((1, loading(7)))
    rig.landed("load-back/7/0", 3)
    rig.landed("load-back/9/0", 3)
    assert readable(probe)
    for number, lease in ((2, 8), (3, 9)):
        later = rig.acquire()
        rig.answer((number, loading(lease)))
        assert not readable(later, 1)


def test_pages_that_another_lease_is_loading_are_readable_when_its_copy_has_landed() -> None:
    rig = Rig()
    first, second = rig.acquire(), rig.acquire()
    rig.answer((1, loading(7)), (2, acquired(8, host_pages=2)))
    assert not readable(second, 1)
    rig.landed("load-back/7/0", 2)
    assert readable(second, 2)
    assert not readable(second, 3)
    rig.landed("load-back/7/0", 3)
    assert readable(first)
    assert readable(second)


def test_pages_that_a_call_before_will_load_are_waited_for_though_it_is_answered_later() -> None:
    rig = Rig()
    rig.acquire(landed=True)
    rig.acquire()
    third = rig.acquire()
    rig.answer((3, acquired(9, host_pages=4, loaded=[(2, 2)])))
    rig.landed("load-back/9/0", 3)
    assert not readable(third, 1)
    rig.answer((1, loading(7)))
    assert not readable(third, 1)
    rig.answer((2, loading(8)))
    rig.landed("load-back/8/0", 3)
    assert readable(third)


def test_a_lease_does_not_wait_for_calls_after_it_nor_for_loads_it_does_not_share() -> None:
    rig = Rig()
    first, second, third = rig.acquire(), rig.acquire(), rig.acquire()
    rig.answer((1, loading(7)), (2, acquired(8, device_pages=1)), (3, loading(9)))
    assert readable(second)
    rig.landed("load-back/9/0", 3)
    assert readable(third)
    assert not readable(first, 1)


def test_a_shared_copy_that_fails_fails_for_all_who_share_it() -> None:
    rig = Rig()
    rig.acquire()
    second = rig.acquire()
    rig.answer((1, loading(7)), (2, acquired(8, host_pages=2)))
    rig.landed("load-back/7/0", 0, "boom")
    with pytest.raises(TransferFailed):
        readable(second, 1)
    assert lease_of(second).error == "boom"


@pytest.mark.parametrize("answer", [Failed("UsageError", ["keys", 0, "fix"]), aborted("load-back/7/0")])
def test_a_call_that_loads_nothing_after_all_holds_up_nobody(answer: Failed | object) -> None:
    rig = Rig()
    rig.acquire()
    second = rig.acquire()
    rig.answer((2, acquired(8, host_pages=2)))
    assert not readable(second, 1)
    if isinstance(answer, Failed):
        rig.answer((1, answer))
    else:
        rig.answer((1, Acquired(aborted("load-back/7/0"), 0, 0, 2, [], [], "load-back/7/0")))
    assert readable(second)


def test_the_copy_of_a_lease_that_nobody_wants_is_still_waited_for_by_those_who_share_it() -> None:
    rig = Rig()
    rig.acquire(gone=True)
    second = rig.acquire()
    rig.sent()
    rig.answer((1, loading(7)), (2, acquired(8, host_pages=2)))
    assert rig.sent() == [[(3, Release(7))]]
    assert not readable(second, 1)
    rig.landed("load-back/7/0", 3)
    assert readable(second)


def test_nobody_can_know_what_lands_once_the_worker_is_gone() -> None:
    rig = Rig()
    probe = rig.acquire()
    rig.answer((1, loading(7)))
    rig.landed("load-back/7/0", 1)
    rig.session.lose("killed")
    assert readable(probe, 1)
    with pytest.raises(PeerUnavailable, match="killed"):
        readable(probe, 2)


def test_there_is_no_layer_outside_the_pools_and_none_of_what_was_aborted() -> None:
    rig = Rig()
    probe, nothing = rig.acquire(), rig.acquire()
    rig.answer((1, loading(7)), (2, Acquired(aborted("load-back/8/0"), 0, 0, 2, [], [], "load-back/8/0")))
    assert [layers_needed(lease_of(probe), layer) for layer in (0, 2, None)] == [1, 3, 3]
    for layer in (-1, 3, True, "1"):
        with pytest.raises(UsageError, match="layers 0 to 2"):
            layers_needed(lease_of(probe), layer)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="aborted"):
        layers_needed(lease_of(nothing), 0)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=20), st.permutations([1, 2, 3, 4]))
def test_reports_and_answers_in_any_order_come_to_the_same(reports: list[tuple[int, int]], answered: list[int]) -> None:
    """Layers never go back, and where in between the answers come makes no difference."""
    rig = Rig()
    probes = [rig.acquire() for _ in range(4)]
    expected = [0, 0, 0, 0]
    for at, (number, layers) in enumerate(reports):
        if at % 3 == 0 and answered:
            current = answered.pop()
            rig.answer((current, loading(current)))
        expected[number - 1] = max(expected[number - 1], layers)
        rig.landed(f"load-back/{number}/0", expected[number - 1])
    for current in answered:
        rig.answer((current, loading(current)))
    assert [lease_of(probe).landings[-1].layers for probe in probes] == expected


def test_who_watches_is_called_once_and_not_after_he_has_left() -> None:
    landing = Landing(3)
    woken: list[str] = []
    landing.watch(lambda: woken.append("stays"))

    def left() -> None:
        woken.append("left")

    landing.watch(left)
    landing.unwatch(left)
    landing.unwatch(left)
    landing.land(1)
    landing.land(2)
    assert woken == ["stays"]
