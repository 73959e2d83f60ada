from hypothesis import given
from hypothesis import strategies as st

from kvcoord.protocol.digest import Digest, first_difference, sides


def applied(events: list[str], kept: int = 4096) -> Digest:
    digest = Digest(kept)
    for event in events:
        digest.apply(event)
    return digest


@given(st.lists(st.text(max_size=4), max_size=6), st.lists(st.text(max_size=4), max_size=6))
def test_equal_events_give_equal_chains_and_others_do_not(one: list[str], other: list[str]) -> None:
    assert (applied(one).chain == applied(other).chain) == (one == other)


def test_the_chain_is_the_same_in_every_process() -> None:
    assert applied(["commit a", "abort b"]).chain == 324673400812380130


def test_the_index_state_is_part_of_what_is_sent() -> None:
    digest = applied(["commit a"])
    assert digest.combined(1) != digest.combined(2)
    assert digest.combined(0) == digest.chain


def test_sides_are_the_largest_first() -> None:
    assert sides({0: 7, 1: 8, 2: 8, 3: 9}) == [[1, 2], [0], [3]]
    assert sides({1: 7, 0: 7}) == [[0, 1]]


def test_the_first_different_event_is_named_with_who_had_what() -> None:
    logs = {
        0: applied(["a", "b", "c"]).log(),
        1: applied(["a", "x", "c"]).log(),
        2: applied(["a", "b", "c"]).log(),
        3: applied(["a"]).log(),
    }
    assert first_difference(logs) == "b (ranks 0,2) against x (ranks 1) against nothing (ranks 3)"


def test_logs_that_do_not_part_or_no_longer_meet_name_nothing() -> None:
    assert first_difference({0: applied(["a"]).log(), 1: applied(["a"]).log()}) == ""
    assert first_difference({0: applied(list("abcdef"), 2).log(), 1: applied(list("xbcdef"), 2).log()}) == ""
    assert first_difference({}) == ""


def test_the_log_is_bounded_and_still_says_where_it_begins() -> None:
    full, short = applied(list("abcdef")), applied(list("abcdef"), 2)
    assert short.log() == [("", full.log()[4][1]), *full.log()[5:]]
    assert first_difference({0: short.log(), 1: applied(list("abcdeX")).log()}) == "f (ranks 0) against X (ranks 1)"
