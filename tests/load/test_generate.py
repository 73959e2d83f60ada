"""Generated traces: reproducible, well formed, and like the public ones."""

from collections.abc import Iterable
from itertools import pairwise
from math import ceil
from statistics import mean, median, pvariance
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcoord.errors import UsageError
from kvcoord.load.generate import PAGE_TOKENS, PRESETS, generate
from kvcoord.load.trace import DEMO, Request, read, statistics

SMALL = msgspec.structs.replace(PRESETS["conversation"], requests=200, conversations_per_s=0.2)


def share_of_later_turns(requests: Iterable[Request], system_pages: int) -> float:
    """The part of the requests that share more than the system pages with an earlier one."""
    seen: set[int] = set()
    later = total = 0
    for request in requests:
        later += request.hash_ids[system_pages] in seen
        total += 1
        seen.update(request.hash_ids[system_pages:])
    return later / total


def tenths(lengths: Iterable[int]) -> list[int]:
    ordered = sorted(lengths)
    return [ordered[len(ordered) * tenth // 10] for tenth in range(1, 10)]


def test_a_seed_names_one_trace() -> None:
    assert list(generate(SMALL, seed=3)) == list(generate(SMALL, seed=3))
    assert list(generate(SMALL, seed=3)) != list(generate(SMALL, seed=4))


def test_the_shipped_demo_is_what_the_generator_makes() -> None:
    assert read(DEMO) == list(generate(PRESETS["demo"], seed=0))


@settings(max_examples=30, deadline=None)
@given(st.integers(), st.sampled_from(sorted(PRESETS)), st.integers(0, 3), st.integers(1, 5000))
def test_every_trace_is_well_formed(seed: int, preset: str, system_pages: int, arrival_batch_ms: int) -> None:
    shape = msgspec.structs.replace(
        PRESETS[preset], requests=100, system_pages=system_pages, arrival_batch_ms=arrival_batch_ms
    )
    requests = list(generate(shape, seed))
    assert len(requests) == 100
    assert all(earlier.timestamp_ms <= later.timestamp_ms for earlier, later in pairwise(requests))
    parents: dict[int, int] = {}
    for request in requests:
        assert request.timestamp_ms % arrival_batch_ms == 0
        assert 1 <= request.input_length <= shape.prompt_tokens_max
        assert request.output_length >= 1
        assert len(request.hash_ids) == ceil(request.input_length / PAGE_TOKENS)
        assert request.hash_ids[:system_pages] == tuple(range(system_pages))
        # An id always follows the same id, so equal ids are equal prefixes.
        for parent, page in pairwise((-1, *request.hash_ids)):
            assert parents.setdefault(page, parent) == parent
    assert sorted(parents) == list(range(len(parents)))


def test_a_partly_filled_last_page_is_not_shared_by_the_next_turn() -> None:
    shape = msgspec.structs.replace(SMALL, continue_probabilities=(1.0,), branch_probability=0.0, requests=400)
    followers: dict[int, int] = {}
    for request in generate(shape, seed=0):
        full_pages = request.input_length // PAGE_TOKENS
        for page in request.hash_ids[:full_pages]:
            followers[page] = followers.get(page, 0) + 1
        for page in request.hash_ids[full_pages:]:
            assert page not in followers
            followers[page] = 1
    assert max(followers.values()) > 2


def test_a_prompt_that_grows_too_long_is_cut() -> None:
    shape = msgspec.structs.replace(SMALL, continue_probabilities=(1.0,), prompt_tokens_max=4 * PAGE_TOKENS)
    assert max(request.input_length for request in generate(shape, seed=0)) == 4 * PAGE_TOKENS


def test_the_conversation_preset_is_like_the_public_conversation_trace() -> None:
    requests = list(generate(PRESETS["conversation"], seed=0))
    found = statistics(requests)
    pages = [len(request.hash_ids) for request in requests]
    assert found.requests == 12_031
    assert found.hit_ratio == pytest.approx(0.366, abs=0.03)
    assert found.duration_ms == pytest.approx(3_537_000, rel=0.1)
    assert mean(pages) == pytest.approx(23.98, rel=0.12)
    assert tenths(pages) == pytest.approx([2, 4, 7, 10, 14, 19, 27, 37, 54], abs=2, rel=0.15)
    assert tenths(request.output_length for request in requests) == pytest.approx(
        [24, 100, 213, 291, 350, 399, 447, 504, 597], rel=0.3
    )
    assert share_of_later_turns(requests, system_pages=1) == pytest.approx(0.387, abs=0.05)


def test_the_synthetic_preset_is_like_the_public_synthetic_trace() -> None:
    requests = list(generate(PRESETS["synthetic"], seed=0))
    found = statistics(requests)
    pages = [len(request.hash_ids) for request in requests]
    assert found.requests == 3_993
    assert found.hit_ratio == pytest.approx(0.640, abs=0.05)
    assert found.duration_ms == pytest.approx(1_022_000, rel=0.15)
    assert mean(pages) == pytest.approx(30.52, rel=0.12)
    assert median(pages) == pytest.approx(23, abs=6)
    assert share_of_later_turns(requests, system_pages=0) == pytest.approx(0.446, abs=0.05)


def test_conversation_requests_arrive_in_bursts_of_poisson_size() -> None:
    requests = list(generate(PRESETS["conversation"], seed=0))
    arrivals = [request.timestamp_ms // 3000 for request in requests]
    sizes = [arrivals.count(batch) for batch in range(100, max(arrivals))]
    assert mean(sizes) == pytest.approx(10.2, rel=0.1)
    assert pvariance(sizes) == pytest.approx(mean(sizes), rel=0.3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("requests", 0),
        ("conversations_per_s", 0.0),
        ("conversations_per_s", float("nan")),
        ("conversations_per_s", float("inf")),
        ("arrival_batch_ms", 0),
        ("system_pages", -1),
        ("prompt_tokens_max", PAGE_TOKENS),
        ("continue_probabilities", ()),
        ("continue_probabilities", (0.5, 1.5)),
        ("branch_probability", -0.1),
        ("gap_s", ((0, 1),)),
        ("gap_s", ((0, 1), (0.5, 2))),
        ("gap_s", ((0, 0), (1, 2))),
        ("first_tokens", ((0, 5), (1, 4))),
        ("single_tokens", ((0, 1), (0.7, 2), (0.2, 3), (1, 4))),
        ("output_tokens", ((0, 1), (0.5, 2), (0.5, 3), (1, 4))),
        ("branch_kept", ((0, 0.1), (1, 1.5))),
    ],
)
def test_a_shape_that_cannot_be_generated_is_refused_at_the_call(field: str, value: Any) -> None:
    shape = msgspec.structs.replace(SMALL, **{field: value})
    with pytest.raises(UsageError) as refused:
        generate(shape, seed=0)
    assert refused.value.field == field
