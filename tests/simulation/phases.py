"""What a scripted group is doing when a fault comes, and how it goes on afterwards."""

from collections.abc import Callable

from kvcoord.domain import Tier
from kvcoord.protocol.local import Advance
from tests.simulation.scripted import Script, pages

A = pages(1, 2, 3, 4)

PHASES: dict[str, Callable[[Script, int], None]] = {
    "idle": lambda script, odd: None,
    "before the vote": lambda script, odd: script.hold_copies(odd),
    "voted": lambda script, odd: _full_write(script),
    "copying": lambda script, odd: _copying(script, odd),
    "copied": lambda script, odd: _copied(script),
    "complete": lambda script, odd: _complete(script),
}
"""What the group is doing when the fault comes."""


def _full_write(script: Script) -> None:
    """More than fits: it is put to the vote of the next frame."""
    script.write(script.acquire(pages(*range(50, 67)))[0].lease)
    script.ask(Advance(script.step))
    script.step += 1


def _copying(script: Script, odd: int) -> None:
    script.hold_copies(odd)
    script.write(script.acquire(A)[0].lease)
    script.pass_time(0.05)


def _complete(script: Script) -> None:
    script.cache(A)


def _copied(script: Script) -> None:
    script.write(script.acquire(A)[0].lease)
    script.pass_time(0.1)


def go_on(script: Script) -> None:
    """Engines drop what they had where the group began anew, and the group works again."""
    for rank in script.everyone:
        script.ranks[rank].copy_weather.stuck = 0
        script.ranks[rank].release_held()
    script.wait(script.joined)
    script.wait(lambda: len({rank.machine.epoch for rank in script.ranks}) == 1)
    script.pass_time(1.0)
    for engine in script.engines:
        engine.asked.clear()
        engine.step, engine.index = 0, 0


def begin_anew(script: Script) -> None:
    """After a rank came back with nothing: every engine registers, and the steps begin at 0."""
    go_on(script)
    for rank in script.ranks:
        rank.register()
    script.step = 0
    script.cache(pages(71, 72))
    assert {script.resident(rank, pages(71, 72), Tier.HOST) for rank in script.everyone} == {2}
    script.check_rest()
