"""The example files load, and explain every option there is."""

from itertools import pairwise
from pathlib import Path

import pytest

from kvcoord.config import CoordinatorConfig, Option, WorkerConfig, explain, load

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
EXAMPLES = sorted(path.name for path in CONFIGS.glob("*.yaml"))


def every_option() -> list[Option]:
    return explain(CoordinatorConfig) + explain(WorkerConfig)


def test_the_examples_are_the_ones_the_documents_name() -> None:
    assert EXAMPLES == ["eight-ranks.yaml", "local.yaml"]


@pytest.mark.parametrize(("example", "world_size"), [("local.yaml", 2), ("eight-ranks.yaml", 8)])
def test_an_example_serves_its_coordinator_and_each_of_its_ranks(example: str, world_size: int) -> None:
    coordinator = load(CoordinatorConfig, file=CONFIGS / example).config
    workers = [load(WorkerConfig, file=CONFIGS / example, flags={"rank": rank}).config for rank in range(world_size)]
    assert {worker.group.world_size for worker in workers} == {world_size}
    assert all(set(coordinator.bind) <= set(worker.coordinators) for worker in workers)
    assert len({worker.listen for worker in workers}) == world_size


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_explains_every_option_in_a_comment_above_it(example: str) -> None:
    lines = [line.strip() for line in (CONFIGS / example).read_text().splitlines()]
    explained = set()
    for above, line in pairwise(lines):
        if above.startswith("# "):
            explained.add(line.removeprefix("# ").removeprefix("- ").partition(":")[0])
    names = {option.name.rpartition(".")[2] for option in every_option()}
    assert names - explained == set()


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_sets_every_option_of_its_processes_apart_from_the_rank(example: str) -> None:
    for config_type, flags in ((CoordinatorConfig, {}), (WorkerConfig, {"rank": 0})):
        loaded = load(config_type, file=CONFIGS / example, flags=flags)
        missing = {option.name for option in explain(config_type) if "[]" not in option.name} - set(loaded.sources)
        assert missing == set()
