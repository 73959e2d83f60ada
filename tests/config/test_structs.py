"""A configuration that exists is a valid one: what the structs refuse and what they derive."""

from typing import Any

import msgspec
import pytest

from kvcoord.config import (
    AgreementMode,
    CoordinatorConfig,
    CopiesConfig,
    GroupConfig,
    Limits,
    PoolConfig,
    PoolKind,
    Timeouts,
    WorkerConfig,
    explain,
    group_fingerprint,
)
from kvcoord.domain import DivergencePolicy, WritePolicy
from kvcoord.errors import ConfigError

KV = PoolConfig(name="kv", page_bytes=64, layers=1)
STATE = PoolConfig(name="s", page_bytes=64, layers=1, kind=PoolKind.STATE)


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        ({}, (1, 1, 1, 1, 1)),
        ({"world_size": 8}, (8, 8, 1, 1, 1)),
        ({"world_size": 8, "pp": 2}, (8, 4, 2, 1, 2)),
        ({"tp": 2, "pp": 2}, (4, 2, 2, 1, 2)),
        ({"tp": 2, "cp": 4, "lag": 3}, (8, 2, 1, 4, 3)),
    ],
)
def test_what_a_group_leaves_out_is_derived_from_the_rest(given: dict[str, int], shape: tuple[int, ...]) -> None:
    group = GroupConfig(**given)  # type: ignore[arg-type]
    assert (group.world_size, group.tp, group.pp, group.cp, group.lag) == shape


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: GroupConfig(world_size=4, tp=2), "world_size"),
        (lambda: GroupConfig(world_size=6, pp=4), "world_size"),
        (lambda: GroupConfig(tp=2, pp=4, lag=3), "lag"),
        (lambda: GroupConfig(pools=[]), "pools"),
        (lambda: GroupConfig(tp=4, kv_replicas=3), "kv_replicas"),
        (lambda: GroupConfig(tp=1, kv_replicas=2), "kv_replicas"),
        (lambda: GroupConfig(tp=2, cp=2, kv_replicas=2), "kv_replicas"),
        (lambda: GroupConfig(tp=2, kv_replicas=2, lockstep=False), "kv_replicas"),
        (lambda: GroupConfig(tp=2, kv_replicas=2, agreement=AgreementMode.NONE), "kv_replicas"),
        (lambda: GroupConfig(tp=2, kv_replicas=2, divergence=DivergencePolicy.WARN), "kv_replicas"),
        (lambda: GroupConfig(tp=2, kv_replicas=2, pools=[KV, STATE]), "kv_replicas"),
        (
            lambda: WorkerConfig(rank=0, group=GroupConfig(tp=2, kv_replicas=2), copies=CopiesConfig(checksums=True)),
            "copies.checksums",
        ),
        (lambda: GroupConfig(pools=[PoolConfig(name="kv", page_bytes=1, layers=1)] * 2), "pools"),
        (lambda: GroupConfig(name="two words"), "name"),
        (lambda: GroupConfig(name="line\n"), "name"),
        (lambda: GroupConfig(page_tokens=0), "page_tokens"),
        (lambda: PoolConfig(name="kv", page_bytes=0, layers=1), "page_bytes"),
        (lambda: CopiesConfig(numa_node=-1), "copies.numa_node"),
        (lambda: PoolConfig(name="w", page_bytes=1, layers=1, kind=PoolKind.WINDOW), "pools.w.window_pages"),
        (
            lambda: PoolConfig(name="s", page_bytes=1, layers=1, kind=PoolKind.STATE, window_pages=2),
            "pools.s.window_pages",
        ),
        (lambda: PoolConfig(name="kv", page_bytes=1, layers=1, host_slots=4), "pools.kv.device_slots"),
        (lambda: GroupConfig(pools=[STATE]), "pools.s.kind"),
        (lambda: GroupConfig(pools=[KV, STATE, msgspec.structs.replace(KV, name="kv2")]), "pools.s.kind"),
        (lambda: GroupConfig(pools=[KV, STATE], lockstep=False), "pools.s.kind"),
        (lambda: GroupConfig(pools=[KV, STATE], write_policy=WritePolicy.WRITE_BACK), "pools.s.kind"),
        (lambda: Limits(groups_max=0), "groups_max"),
        (lambda: Timeouts(vote_timeout_s=0), "vote_timeout_s"),
        (lambda: Timeouts(vote_timeout_s=float("inf")), "vote_timeout_s"),
        (lambda: Timeouts(vote_timeout_s=float("nan")), "vote_timeout_s"),
        (lambda: Timeouts(heartbeat_interval_s=2.0), "heartbeat_timeout_s"),
        (lambda: WorkerConfig(rank=1), "rank"),
        (lambda: WorkerConfig(rank=-1), "rank"),
        (lambda: WorkerConfig(rank=0, group=GroupConfig(tp=4), limits=Limits(ranks_max=3)), "group.world_size"),
        (
            lambda: WorkerConfig(rank=0, group=GroupConfig(lag=8), limits=Limits(rounds_kept_max=8)),
            "limits.rounds_kept_max",
        ),
        (
            lambda: WorkerConfig(rank=0, group=GroupConfig(pools=[KV, STATE]), device_pages=1),
            "group.pools.s.device_slots",
        ),
        (lambda: WorkerConfig(rank=0, listen="tcp://127.0.0.1:18500"), "listen"),
        (lambda: WorkerConfig(rank=0, listen="ipc://relative.sock"), "listen"),
        (lambda: WorkerConfig(rank=0, listen="ipc:///" + "x" * 107), "listen"),
        (lambda: WorkerConfig(rank=0, coordinators=[]), "coordinators"),
        (lambda: WorkerConfig(rank=0, coordinators=["ipc:///a", "ipc:///a"]), "coordinators"),
        (lambda: WorkerConfig(rank=0, coordinators=["unix:///a", "ipc:///a"]), "coordinators"),
        (lambda: WorkerConfig(rank=0, coordinators=["unix://a"]), "coordinators"),
        (lambda: CoordinatorConfig(bind=["unix:///" + "x" * 107]), "bind"),
        (lambda: WorkerConfig(rank=0, coordinators=["tcp://10.0.0.1:18500"]), "coordinators"),
        (lambda: WorkerConfig(rank=0, coordinators=["tcp://10.0.0.1:*"], insecure_tcp=True), "coordinators"),
        (lambda: CoordinatorConfig(bind=["udp://10.0.0.1:1"]), "bind"),
        (lambda: CoordinatorConfig(bind=["tcp://10.0.0.1:18500"]), "bind"),
        (lambda: CoordinatorConfig(bind=["tcp://10.0.0.1:99999"], insecure_tcp=True), "bind"),
        (lambda: CoordinatorConfig(http="0.0.0.0:18470"), "http"),
        (lambda: WorkerConfig(rank=0, host_pages=1 << 44), "host_pages"),
        (lambda: WorkerConfig(rank=0, device_pages=0), "device_pages"),
        (lambda: CoordinatorConfig(http="127.0.0.1"), "http"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_and_the_option_named(make: Any, field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make()
    assert raised.value.field == field
    assert raised.value.fix


@pytest.mark.parametrize(
    "make",
    [
        lambda: CoordinatorConfig(bind=["tcp://127.0.0.1:*"], insecure_tcp=True),
        lambda: CoordinatorConfig(bind=["tcp://10.0.0.1:18500"], curve_keys_dir="keys"),
        lambda: CoordinatorConfig(http=None),
        lambda: CoordinatorConfig(http="[::1]:0"),
        lambda: WorkerConfig(
            rank=0,
            coordinators=["tcp://10.0.0.1:18500", "ipc:///a"],
            curve_keys_dir="keys",
        ),
        lambda: WorkerConfig(rank=0, listen="ipc:///" + "x" * 106),
        lambda: WorkerConfig(rank=0, listen="unix:///a", coordinators=["unix:///b", "ipc:///c"]),
        lambda: CoordinatorConfig(bind=["unix:///a", "ipc:///b", "tcp://127.0.0.1:*"], insecure_tcp=True),
    ],
)
def test_what_can_work_is_accepted(make: Any) -> None:
    make()


def test_the_rank_is_filled_into_what_differs_between_the_ranks_of_a_node() -> None:
    group = GroupConfig(tp=8)
    worker = WorkerConfig(rank=5, group=group, http="127.0.0.1:1848{rank}", curve_keys_dir="keys/rank{rank}")
    assert (worker.listen, worker.http) == ("ipc:///run/kvcoord/rank5.sock", "127.0.0.1:18485")
    assert worker.curve_keys_dir == "keys/rank5"


def test_a_fingerprint_differs_exactly_in_the_option_that_differs() -> None:
    base = {"tp": 2, "pools": [PoolConfig(name="kv", page_bytes=64, layers=2)]}
    changes: dict[str, tuple[str, object]] = {
        "page_tokens": ("page_tokens", 32),
        "lag": ("lag", 2),
        "write_policy": ("write_policy", WritePolicy.WRITE_BACK),
        "write_hits_min": ("write_hits_min", 3),
        "pools.kv.page_bytes": ("pools", [PoolConfig(name="kv", page_bytes=65, layers=2)]),
        "pools.kv.layers": ("pools", [PoolConfig(name="kv", page_bytes=64, layers=3)]),
        "pools.kv.dtype": ("pools", [PoolConfig(name="kv", page_bytes=64, layers=2, dtype="float16")]),
    }
    check_fingerprint(base, changes)


def test_ranks_that_keep_different_ends_of_a_sequence_have_different_fingerprints() -> None:
    def pools(window_pages: int = 3, **slots: int) -> list[PoolConfig]:
        window = {"kind": "window", "window_pages": window_pages, "name": "w", "page_bytes": 64, "layers": 2}
        return [KV, msgspec.convert(window | slots, PoolConfig)]

    changes: dict[str, tuple[str, object]] = {"pools.w.window_pages": ("pools", pools(window_pages=4))}
    check_fingerprint({"tp": 2, "pools": pools()}, changes)
    smaller = group_fingerprint(GroupConfig(tp=2, pools=pools(device_slots=8, host_slots=9)))
    assert smaller == group_fingerprint(GroupConfig(tp=2, pools=pools())), "the smallest counts, so sizes may differ"


def check_fingerprint(base: dict[str, Any], changes: dict[str, tuple[str, object]]) -> None:
    """Each change of one option is seen in the fingerprint under its name, and nowhere else."""
    expected = group_fingerprint(GroupConfig(**base))
    for name, (option, value) in changes.items():
        found = group_fingerprint(GroupConfig(**(base | {option: value})))
        assert {key for key in expected | found if expected.get(key) != found.get(key)} == {name}


def test_a_fingerprint_names_every_option_of_the_group_but_its_name() -> None:
    names = set(group_fingerprint(GroupConfig()))
    assert names >= set(GroupConfig.__struct_fields__) - {"name"}
    of_one_rank = {"name", "device_slots", "host_slots"}
    assert {f"pools.kv.{name}" for name in set(PoolConfig.__struct_fields__) - of_one_rank} <= names


@pytest.mark.parametrize("config_type", [CoordinatorConfig, WorkerConfig])
def test_every_option_has_a_description_and_a_type(config_type: type[msgspec.Struct]) -> None:
    options = explain(config_type)
    assert [option.name for option in options if not option.description or not option.type] == []
    assert len({option.name for option in options}) == len(options)


def test_an_explained_option_says_type_default_and_variable() -> None:
    options = {option.name: option for option in explain(WorkerConfig)}
    vote = options["timeouts.vote_timeout_s"]
    assert (vote.type, vote.default, vote.variable) == ("number > 0", "5.0", "KVCOORD_TIMEOUTS__VOTE_TIMEOUT_S")
    assert options["rank"].default == ""
    assert options["group.eviction"].type == "one of lru, lfu, priority"
    assert options["http"].type == "text or null"
    assert "group.pools[].page_bytes" in options


@pytest.mark.parametrize(
    ("field", "pool"),
    [
        ("pools.kv.parts", {"page_bytes": 64, "layers": 3, "parts": 3}),
        ("pools.kv.stage_layers", {"page_bytes": 64, "layers": 3, "stage_layers": [3, 3, 3]}),
        ("pools.stage_layers", {"page_bytes": 64, "layers": 3, "stage_layers": [3, 0]}),
    ],
)
def test_a_shape_that_no_page_can_have_is_refused(field: str, pool: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        msgspec.convert({"pp": 2, "pools": [{"name": "kv", **pool}]}, GroupConfig)
    assert caught.value.field == field


def test_the_ranks_of_a_pipeline_stage_are_neighbours_and_have_its_layers() -> None:
    pool = {"name": "kv", "page_bytes": 64, "layers": 3, "stage_layers": [4, 2]}
    group = msgspec.convert({"pp": 2, "tp": 2, "world_size": 4, "pools": [pool]}, GroupConfig)
    assert [group.pools[0].layers_of_stage(group.stage(rank)) for rank in range(4)] == [4, 4, 2, 2]
