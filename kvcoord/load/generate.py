"""Traces made from a seed, with the statistics of the public Mooncake traces (FAST'25), for people who have none.

The model: conversations start at random times. A conversation is a chain of prompts, each of which begins with the
prompt before it: a chat grows at its end, a question about a document replaces the one before it. So all full pages of
the earlier prompt are shared and its last, partly filled page is not. Now and then a turn branches off earlier: it
keeps only a part of the prompt before it. All prompts may start with the same system pages.

Lengths, gaps and fractions are drawn from quantiles measured on the public traces; the presets hold them. Only
`random.Random(seed).random()` is drawn from, which Python promises not to change: a seed names one trace.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from itertools import count
from typing import Final

import msgspec

from kvcoord.errors import UsageError
from kvcoord.load.trace import Request

PAGE_TOKENS: Final = 512

Quantiles = tuple[tuple[float, float], ...]
"""A distribution as (fraction, value > 0) knots from fraction 0 to 1, both rising; geometric between two knots."""


class TraceShape(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of a trace. Times in the unit of their name, lengths in tokens, probabilities 0 to 1.

    A conversation of one turn takes its prompt's length from `single_tokens`, others their first from `first_tokens`.
    A later turn is `growth_tokens` longer than the one before, or, with `branch_probability`, keeps the fraction
    `branch_kept` of it and adds `branch_tokens`.
    """

    requests: int
    conversations_per_s: float
    """Conversations start as a Poisson process of this rate."""
    arrival_batch_ms: int
    """Requests arrive in bursts at multiples of this time; 1 for none."""
    system_pages: int
    """Pages that every prompt starts with."""
    continue_probabilities: tuple[float, ...]
    """That turn 1, 2, ... is followed by another; the last holds for all later turns."""
    gap_s: Quantiles
    """From one turn of a conversation to its next."""
    single_tokens: Quantiles
    first_tokens: Quantiles
    growth_tokens: Quantiles
    branch_probability: float
    branch_kept: Quantiles
    branch_tokens: Quantiles
    output_tokens: Quantiles
    prompt_tokens_max: int
    """A longer prompt is cut to this."""


class _Prompt(msgspec.Struct, frozen=True):
    tokens: int
    pages: tuple[int, ...]


def generate(shape: TraceShape, seed: int) -> Iterator[Request]:
    """Make `shape.requests` requests in order of arrival. Page ids count up from 0, system pages first.

    Raises UsageError at the call, not at the first request, when the shape cannot be generated.
    """
    _check(shape)
    return _generate(shape, random.Random(seed))


def _generate(shape: TraceShape, rng: random.Random) -> Iterator[Request]:
    page_ids = count(shape.system_pages)
    system = _Prompt(shape.system_pages * PAGE_TOKENS, tuple(range(shape.system_pages)))
    # Due turns: (time in s, conversation number, turns before it, the prompt that it extends).
    due: list[tuple[float, int, int, _Prompt]] = [(0.0, 0, 0, system)]
    for _ in range(shape.requests):
        now_s, number, turn, before = heappop(due)
        if turn == 0:
            heappush(due, (now_s - math.log(1 - rng.random()) / shape.conversations_per_s, number + 1, 0, system))
        goes_on = rng.random() < shape.continue_probabilities[min(turn, len(shape.continue_probabilities) - 1)]
        kept_tokens, tokens = _first(shape, rng, goes_on) if turn == 0 else _next(shape, rng, before.tokens)
        prompt = _extend(before, kept_tokens, min(tokens, shape.prompt_tokens_max), page_ids)
        if goes_on:
            heappush(due, (now_s + _draw(rng, shape.gap_s), number, turn + 1, prompt))
        yield Request(
            timestamp_ms=math.ceil(now_s * 1000 / shape.arrival_batch_ms) * shape.arrival_batch_ms,
            input_length=prompt.tokens,
            output_length=round(_draw(rng, shape.output_tokens)),
            hash_ids=prompt.pages,
        )


def _first(shape: TraceShape, rng: random.Random, goes_on: bool) -> tuple[int, int]:
    """Tokens kept of the system prompt, which is all, and tokens of a conversation's first prompt."""
    system_tokens = shape.system_pages * PAGE_TOKENS
    drawn = round(_draw(rng, shape.first_tokens if goes_on else shape.single_tokens))
    return system_tokens, max(drawn, system_tokens + 1)


def _next(shape: TraceShape, rng: random.Random, before_tokens: int) -> tuple[int, int]:
    """Tokens kept of the prompt before, and tokens of the prompt that follows it."""
    if rng.random() >= shape.branch_probability:
        return before_tokens, before_tokens + round(_draw(rng, shape.growth_tokens))
    kept_tokens = max(round(before_tokens * _draw(rng, shape.branch_kept)), shape.system_pages * PAGE_TOKENS)
    return kept_tokens, kept_tokens + max(round(_draw(rng, shape.branch_tokens)), 1)


def _extend(before: _Prompt, kept_tokens: int, tokens: int, page_ids: Iterator[int]) -> _Prompt:
    """A prompt of `tokens` that shares the full pages among the first `kept_tokens` with the one before it."""
    kept_pages = kept_tokens // PAGE_TOKENS
    new_pages = math.ceil(tokens / PAGE_TOKENS) - kept_pages
    return _Prompt(tokens, before.pages[:kept_pages] + tuple(next(page_ids) for _ in range(new_pages)))


def _draw(rng: random.Random, quantiles: Quantiles) -> float:
    fraction = rng.random()
    above = bisect_right(quantiles, fraction, key=lambda knot: knot[0])
    (low, low_value), (high, high_value) = quantiles[above - 1], quantiles[above]
    return float(low_value * (high_value / low_value) ** ((fraction - low) / (high - low)))


def _check(shape: TraceShape) -> None:
    for field in ("requests", "arrival_batch_ms", "conversations_per_s"):
        if not 0 < getattr(shape, field) < math.inf:
            raise UsageError(field, getattr(shape, field), "give a number > 0")
    if shape.system_pages < 0:
        raise UsageError("system_pages", shape.system_pages, "give a number of pages >= 0")
    if shape.prompt_tokens_max <= shape.system_pages * PAGE_TOKENS:
        raise UsageError("prompt_tokens_max", shape.prompt_tokens_max, "give more tokens than the system pages hold")
    if not shape.continue_probabilities:
        raise UsageError("continue_probabilities", (), "give at least one probability")
    for field, probabilities in (
        ("continue_probabilities", shape.continue_probabilities),
        ("branch_probability", (shape.branch_probability,)),
    ):
        if not all(0 <= probability <= 1 for probability in probabilities):
            raise UsageError(field, probabilities, "give probabilities from 0 to 1")
    for field in shape.__struct_fields__:
        if field.endswith(("gap_s", "_tokens", "_kept")):
            _check_quantiles(field, getattr(shape, field))
    if shape.branch_kept[-1][1] > 1:
        raise UsageError("branch_kept", shape.branch_kept, "give fractions up to 1: no more than all can be kept")


def _check_quantiles(field: str, quantiles: Quantiles) -> None:
    fractions = [fraction for fraction, _ in quantiles]
    values = [value for _, value in quantiles]
    if len(quantiles) < 2 or fractions[0] != 0 or fractions[-1] != 1 or sorted(set(fractions)) != fractions:
        raise UsageError(field, quantiles, "give (fraction, value) knots with fractions rising from 0 to 1")
    if not 0 < values[0] <= values[-1] < math.inf or sorted(values) != values:
        raise UsageError(field, quantiles, "give (fraction, value) knots with values > 0 that do not fall")


_CONVERSATION: Final = TraceShape(
    requests=12_031,
    conversations_per_s=2.15,
    arrival_batch_ms=3_000,
    system_pages=1,
    continue_probabilities=(0.335, 0.44, 0.54, 0.62, 0.65, 0.71, 0.78),
    gap_s=((0, 1), (0.01, 12), (0.1, 39), (0.3, 75), (0.5, 123), (0.7, 225), (0.9, 474), (0.99, 1458), (1, 3030)),
    single_tokens=(
        (0, 891), (0.25, 1011), (0.4, 2856), (0.5, 4721), (0.6, 6509), (0.75, 12_104), (0.9, 25_690), (0.95, 40_327),
        (0.99, 94_410), (1, 126_195),
    ),
    first_tokens=(
        (0, 892), (0.1, 1298), (0.2, 2016), (0.3, 3876), (0.5, 6893), (0.75, 14_593), (0.9, 25_409), (0.95, 33_732),
        (0.99, 73_427), (1, 122_891),
    ),
    growth_tokens=(
        (0, 1), (0.05, 20), (0.2, 192), (0.5, 471), (0.7, 684), (0.8, 1291), (0.9, 4605), (0.99, 17_031),
        (0.999, 38_862), (1, 91_918),
    ),
    branch_probability=0.15,
    branch_kept=((0, 0.02), (0.2, 0.1), (0.5, 0.21), (0.7, 0.4), (0.9, 0.83), (1, 0.99)),
    branch_tokens=(
        (0, 300), (0.1, 2048), (0.2, 5120), (0.5, 8704), (0.8, 16_384), (0.95, 26_624), (0.99, 43_520), (1, 95_000),
    ),
    output_tokens=(
        (0, 1), (0.05, 10), (0.1, 24), (0.2, 100), (0.5, 350), (0.75, 472), (0.9, 597), (0.99, 1120), (1, 2000),
    ),
    prompt_tokens_max=126_976,
)  # fmt: skip

_SYNTHETIC: Final = TraceShape(
    requests=3_993,
    conversations_per_s=2.1,
    arrival_batch_ms=1,
    system_pages=0,
    continue_probabilities=(0.22, 0.92, 0.92, 0.91, 0.91, 0.86, 0.86, 0.84, 0.84, 0.89),
    gap_s=((0, 0.01), (0.01, 0.37), (0.05, 2.2), (0.1, 5), (0.3, 23), (0.5, 50), (0.7, 115), (0.9, 250), (1, 790)),
    single_tokens=(
        (0, 13), (0.2, 30), (0.4, 74), (0.5, 169), (0.6, 542), (0.65, 1022), (0.7, 3540), (0.725, 12_200),
        (0.8, 15_775), (0.9, 19_625), (0.95, 24_429), (0.99, 41_155), (1, 134_773),
    ),
    first_tokens=(
        (0, 13), (0.05, 783), (0.1, 2943), (0.25, 9435), (0.35, 14_997), (0.5, 19_506), (0.75, 35_397), (0.9, 44_005),
        (0.99, 66_454), (1, 191_374),
    ),
    growth_tokens=((0, 1), (0.8, 9), (0.85, 105), (0.93, 362), (0.99, 1500), (1, 1814)),
    branch_probability=0.23,
    branch_kept=((0, 0.01), (0.01, 0.71), (0.05, 0.88), (0.2, 0.94), (0.5, 0.96), (1, 0.99)),
    branch_tokens=((0, 100), (0.5, 600), (0.9, 1500), (0.99, 2500), (1, 60_000)),
    output_tokens=((0, 1), (0.2, 8), (0.5, 69), (0.75, 250), (0.9, 389), (0.99, 750), (1, 893)),
    prompt_tokens_max=196_608,
)  # fmt: skip

PRESETS: Final[Mapping[str, TraceShape]] = {
    "conversation": _CONVERSATION,
    "synthetic": _SYNTHETIC,
    "demo": msgspec.structs.replace(_CONVERSATION, requests=600, conversations_per_s=0.1),
}
"""`conversation`: chats. `synthetic`: tools and agents, many questions on few documents. `demo`: a few chats."""
