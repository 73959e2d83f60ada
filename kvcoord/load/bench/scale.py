"""`kvcoord bench scale`: what a decision costs one coordinator as ranks and groups grow, up to where it ends.

A round of R ranks with V votes a frame costs c + R x (a + V x b): c for the verdict, a for a frame and for sending the
verdict to its rank, b for a vote. The constants come from measurements of a few ranks; the same machine with up to
1,024 simulated ranks shows whether the model holds. The network is not in it: a verdict to R ranks is R small messages.
"""

from collections.abc import Callable
from statistics import median
from typing import Final

import msgspec

from kvcoord.load.bench.coordinator import SCALE_RANKS, rounds_of, run_tally, start_tally
from kvcoord.load.bench.result import Chart, Line, Result
from kvcoord.load.bench.tally import TallyPlan
from kvcoord.runtime.children import Children

FEW_RANKS: Final = 2
FITTED_RANKS: Final = 16
MANY_VOTES: Final = 16
STEP_US: Final = 5000.0


class ScaleRow(msgspec.Struct, frozen=True, kw_only=True):
    """One size. `core_share`: of one core, when every group makes a step each 5 ms. `groups_max`: what fits a core."""

    ranks: int
    votes: int
    round_us: float
    model_us: float
    decision_us: float
    core_share: float
    groups_max: int


class Model(msgspec.Struct, frozen=True):
    """Microseconds of the coordinator's core for each verdict, for each frame, and for each vote in it."""

    verdict_us: float
    frame_us: float
    vote_us: float

    def round_us(self, ranks: int, votes: int) -> float:
        return self.verdict_us + ranks * (self.frame_us + votes * self.vote_us)


async def scale(*, quick: bool, on_case: Callable[[str], None] = lambda _: None) -> Result:
    """Fits the model, then looks at every size."""
    sizes = [ranks for ranks in SCALE_RANKS if not quick or ranks <= 32]
    async with Children(keep_errors=True) as children:

        async def measure(ranks: int, votes: int) -> float:
            on_case(f"{ranks} ranks, {votes} votes")
            plan = TallyPlan(ranks=ranks, groups=1, votes=votes, rounds=0)
            child = await start_tally(children)
            report = await run_tally(child, msgspec.structs.replace(plan, rounds=rounds_of(plan)))
            await child.finish()
            return median(report.rounds_us)

        model = fit(
            await measure(FEW_RANKS, 0), await measure(FITTED_RANKS, 0), await measure(FITTED_RANKS, MANY_VOTES)
        )
        rows = [scale_row(ranks, 1, await measure(ranks, 1), model) for ranks in sizes]
    return Result(
        name="scale",
        title="One coordinator core as groups grow",
        rows=rows,
        charts=[_chart(rows)],
        notes=[
            f"Model: {model.verdict_us:.1f} us a verdict, {model.frame_us:.2f} us a frame and {model.vote_us:.2f} us a"
            f" vote, from {FEW_RANKS} and {FITTED_RANKS} ranks.",
            "A coordinator ends where its core does: groups x ranks x frames a second. Groups are independent, so more"
            " of them are spread over more coordinators, each with its own list of addresses.",
            "One group of very many ranks is cut by a relay on each node that folds its ranks' frames into one: the"
            " coordinator then sees nodes instead of ranks, at the price of one more hop.",
        ],
    )


def fit(few_us: float, idle_us: float, busy_us: float) -> Model:
    """From a round of FEW_RANKS and one of FITTED_RANKS without votes, and one with MANY_VOTES votes a frame."""
    frame_us = max((idle_us - few_us) / (FITTED_RANKS - FEW_RANKS), 0.0)
    vote_us = max((busy_us - idle_us) / (FITTED_RANKS * MANY_VOTES), 0.0)
    return Model(max(few_us - FEW_RANKS * frame_us, 0.0), frame_us, vote_us)


def scale_row(ranks: int, votes: int, round_us: float, model: Model) -> ScaleRow:
    return ScaleRow(
        ranks=ranks,
        votes=votes,
        round_us=round_us,
        model_us=model.round_us(ranks, votes),
        decision_us=round_us / votes,
        core_share=round_us / STEP_US,
        groups_max=int(STEP_US / round_us),
    )


def _chart(rows: list[ScaleRow]) -> Chart:
    return Chart(
        title="One round on the coordinator's core, as ranks grow",
        x_label="ranks",
        y_label="microseconds",
        lines=[
            Line("measured with simulated ranks", [(float(row.ranks), row.round_us) for row in rows]),
            Line("model", [(float(row.ranks), row.model_us) for row in rows]),
        ],
        x_log=True,
        y_log=True,
    )
