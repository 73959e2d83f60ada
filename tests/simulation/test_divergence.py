"""Groups that resync under every other fault: one rank's digest is spoilt now and then, and no promise is broken."""

import random
from functools import partial

import msgspec
import pytest

from kvcoord.domain import DivergencePolicy
from kvcoord.simulation.faults import draw_faults
from kvcoord.simulation.shape import Options, draw_shape
from kvcoord.simulation.world import World

SPOILT = 3
"""Times in the bad time of a world."""


def spoiling(seed: int) -> World:
    """The world of a seed, in a group that resyncs, with a rank that thinks that it has applied something else."""
    options = Options(ranks=3, lockstep=True, replicated=False)
    shape = draw_shape(options, seed)
    group = msgspec.structs.replace(shape.group, divergence=DivergencePolicy.RESYNC)
    world = World(msgspec.structs.replace(shape, group=group), seed, draw_faults(options, shape, seed), options.fault_s)
    world.faultless, world.failures_allowed = False, {"GroupRenewed"}
    rng = random.Random(f"{seed}/spoilt")
    for _ in range(SPOILT):
        world.agenda.at(rng.uniform(1.0, options.fault_s), partial(spoil, world, rng.randrange(3)))
    return world


def spoil(world: World, number: int) -> None:
    rank = world.ranks[number]
    if rank.alive:
        world.story.fault(f"the digest of {rank.name} is spoilt")
        rank.worker.cache.state.digest.chain ^= 1


@pytest.mark.parametrize("seed", range(12))
def test_a_spoilt_group_comes_to_rest_with_one_digest(seed: int) -> None:
    world = spoiling(seed)
    world.run()
    assert any(rank.worker.divergences for rank in world.ranks), "at least once it was noticed"
