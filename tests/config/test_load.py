"""Where values come from: precedence, conversion, and errors that say what to change where."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcoord.config import CoordinatorConfig, LogFormat, WorkerConfig, load, resolved
from kvcoord.errors import ConfigError

RANK = {"rank": 0}


def written(folder: Path, text: str, name: str = "node.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refusal(config_type: type[msgspec.Struct], **sources: object) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        load(config_type, **sources)  # type: ignore[arg-type]
    return raised.value


def test_a_flag_goes_before_a_variable_before_the_file_before_the_default(tmp_path: Path) -> None:
    file = written(tmp_path, "timeouts: {vote_timeout_s: 1, copy_timeout_s: 1, join_timeout_s: 1}")
    environment = {"KVCOORD_TIMEOUTS__VOTE_TIMEOUT_S": "2", "KVCOORD_TIMEOUTS__COPY_TIMEOUT_S": "2"}
    flags = {"timeouts.vote_timeout_s": "3", "timeouts.copy_timeout_s": None}
    loaded = load(CoordinatorConfig, file=file, environment=environment, flags=flags)
    timeouts = loaded.config.timeouts
    assert (timeouts.vote_timeout_s, timeouts.copy_timeout_s, timeouts.join_timeout_s) == (3, 2, 1)
    assert timeouts.prepare_timeout_s == 5
    assert loaded.sources == {
        "timeouts.vote_timeout_s": "flag timeouts.vote_timeout_s",
        "timeouts.copy_timeout_s": "KVCOORD_TIMEOUTS__COPY_TIMEOUT_S",
        "timeouts.join_timeout_s": str(file),
    }


def test_text_from_the_environment_becomes_the_type_of_its_option() -> None:
    environment = {
        "KVCOORD_RANK": "1",
        "KVCOORD_GROUP__TP": "2",
        "KVCOORD_GROUP__POOLS": "[{name: kv, page_bytes: 64, layers: 3}]",
        "KVCOORD_COORDINATORS": "ipc:///a, ipc:///b",
        "KVCOORD_HTTP": "",
        "KVCOORD_INSECURE_TCP": "true",
        "KVCOORD_LOG_FORMAT": "json",
        "PATH": "/bin",
    }
    config = load(WorkerConfig, environment=environment).config
    assert (config.rank, config.group.world_size, config.group.pools[0].layers) == (1, 2, 3)
    assert config.coordinators == ["ipc:///a", "ipc:///b"]
    assert (config.http, config.insecure_tcp, config.log_format) == (None, True, LogFormat.JSON)


def test_toml_and_yaml_say_the_same_thing(tmp_path: Path) -> None:
    yaml_text = "rank: 1\ngroup:\n  tp: 2\n  pools:\n    - {name: kv, page_bytes: 64, layers: 3}\n"
    toml_text = 'rank = 1\n[group]\ntp = 2\n[[group.pools]]\nname = "kv"\npage_bytes = 64\nlayers = 3\n'
    from_yaml = load(WorkerConfig, file=written(tmp_path, yaml_text)).config
    assert from_yaml == load(WorkerConfig, file=written(tmp_path, toml_text, "node.toml")).config


def test_processes_share_a_file_and_a_section_goes_before_what_stands_beside_it(tmp_path: Path) -> None:
    text = "group: {tp: 2}\nhttp: null\nlog_level: debug\ncoordinator: {http: '127.0.0.1:1'}\nworker: {rank: 1}\n"
    file = written(tmp_path, text)
    coordinator, worker = load(CoordinatorConfig, file=file).config, load(WorkerConfig, file=file).config
    assert (coordinator.http, worker.http, worker.rank) == ("127.0.0.1:1", None, 1)
    assert coordinator.log_level == worker.log_level == "debug"


def test_processes_share_an_environment() -> None:
    environment = {"KVCOORD_GROUP__TP": "2", "KVCOORD_HTTP": "127.0.0.1:1", "KVCOORD_WORKER__HTTP": "127.0.0.1:2"}
    assert load(CoordinatorConfig, environment=environment).config.http == "127.0.0.1:1"
    assert load(WorkerConfig, environment=environment, flags=RANK).config.http == "127.0.0.1:2"


@pytest.mark.parametrize(
    ("text", "field", "hint"),
    [
        ("timeout: {}", "timeout", "timeouts."),
        ("timeouts: {vote_timeout: 1}", "timeouts.vote_timeout", "timeouts.vote_timeout_s"),
        ("vote_timeout_s: 1", "vote_timeout_s", "timeouts.vote_timeout_s"),
        ("group: {page_token: 1}", "group.page_token", "group.page_tokens"),
        ("group: {pools: [{name: kv, layer: 1}]}", "group.pools[0].layer", "group.pools[0].layers"),
        ("coordinator: {bindd: []}", "bindd", "bind"),
        ("xyzzy: 1", "xyzzy", "kvcoord config"),
    ],
)
def test_an_unknown_option_in_a_file_is_named_with_the_nearest_known(
    tmp_path: Path, text: str, field: str, hint: str
) -> None:
    file = written(tmp_path, text)
    error = refusal(WorkerConfig, file=file, flags=RANK)
    assert (error.field, error.source) == (field, str(file))
    assert hint in error.fix


def test_an_unknown_variable_or_flag_is_named_with_the_nearest_known() -> None:
    error = refusal(CoordinatorConfig, environment={"KVCOORD_TIMEOUTS__VOTE_TIMEOUT": "1"})
    assert (error.field, error.source) == ("timeouts.vote_timeout", "KVCOORD_TIMEOUTS__VOTE_TIMEOUT")
    assert "timeouts.vote_timeout_s" in error.fix
    error = refusal(CoordinatorConfig, flags={"group.tp": 2})
    assert (error.field, error.source) == ("group.tp", "flag group.tp")


@pytest.mark.parametrize(
    ("text", "field", "expected"),
    [
        ("rank: '1'", "rank", "integer >= 0"),
        ("rank: true", "rank", "integer >= 0"),
        ("rank: 1.5", "rank", "integer >= 0"),
        ("insecure_tcp: 1", "insecure_tcp", "true or false"),
        ("log_format: xml", "log_format", "one of text, json"),
        ("coordinators: ipc:///a", "coordinators", "list of text"),
        ("coordinators: [1]", "coordinators", "list of text"),
        ("group: {eviction: fifo}", "group.eviction", "one of lru, lfu, priority"),
        ("group: {pools: kv}", "group.pools", "list of mappings: name, page_bytes, layers, dtype"),
        ("group: {pools: [kv]}", "group.pools[0]", "section"),
        ("group: {pools: [{name: kv, page_bytes: 8, layers: 0}]}", "group.pools[0].layers", "integer >= 1"),
        ("group: {pools: [{name: kv, page_bytes: 8}]}", "group.pools[0].layers", "is required"),
        ("timeouts: {linger_s: -1}", "timeouts.linger_s", "number > 0"),
        ("timeouts: 3", "timeouts", "section"),
        ("group: {world_size: 3, tp: 2}", "group.world_size", "tp x pp x cp"),
        ("limits: {rounds_kept_max: 1}", "limits.rounds_kept_max", "lag"),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_what_it_should_be(
    tmp_path: Path, text: str, field: str, expected: str
) -> None:
    file = written(tmp_path, text)
    error = refusal(WorkerConfig, file=file, flags=None if "rank" in text else RANK)
    assert error.field == field
    assert expected in error.fix
    assert error.source == str(file) or expected == "is required"


def test_a_required_option_that_nobody_gave_says_how_to_give_it() -> None:
    error = refusal(WorkerConfig)
    assert error.field == "rank"
    assert "KVCOORD_RANK" in error.fix


def test_a_section_is_not_set_as_a_whole_by_a_variable() -> None:
    error = refusal(CoordinatorConfig, environment={"KVCOORD_TIMEOUTS": "3"})
    assert "timeouts.heartbeat_interval_s" in error.fix


@pytest.mark.parametrize(
    ("name", "text", "fix"),
    [
        ("node.ini", "", ".yaml"),
        ("node.yaml", "rank: [", "not valid"),
        ("node.yaml", "rank: 1\nrank: 2", "'rank' is set twice"),
        ("node.yaml", "- 1", "section"),
        ("node.toml", "rank = ", "not valid"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_cause(tmp_path: Path, name: str, text: str, fix: str) -> None:
    error = refusal(WorkerConfig, file=written(tmp_path, text, name))
    assert fix in error.fix
    assert name in str(error)


def test_a_missing_file_is_named() -> None:
    assert "No such file" in refusal(WorkerConfig, file=Path("/nowhere/node.yaml")).fix


def test_a_section_with_nothing_in_it_is_allowed(tmp_path: Path) -> None:
    assert load(WorkerConfig, file=written(tmp_path, "rank: 0\ntimeouts:\nworker:\n")).config.rank == 0
    assert load(CoordinatorConfig, file=written(tmp_path, "")).sources == {}


@given(
    st.fixed_dictionaries(
        {"rank": st.integers(0, 3), "group.world_size": st.just(4)},
        optional={
            "http": st.sampled_from(["", "127.0.0.1:0", "localhost:1"]),
            "group.lag": st.integers(1, 100),
            "group.name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", fullmatch=True),
            "timeouts.linger_s": st.floats(0, 86_400, exclude_min=True),
            "curve_keys_dir": st.sampled_from(["a: #b", "{x}", "null", " ", "1e3"]),
            "insecure_tcp": st.booleans(),
        },
    )
)
def test_the_resolved_form_loads_to_the_same_configuration(
    tmp_path_factory: pytest.TempPathFactory, flags: dict[str, object]
) -> None:
    loaded = load(WorkerConfig, flags=flags)
    file = written(tmp_path_factory.getbasetemp(), resolved(loaded), "resolved.yaml")
    assert load(WorkerConfig, file=file).config == loaded.config


def test_the_resolved_form_says_where_each_value_came_from() -> None:
    lines = resolved(load(WorkerConfig, environment={"KVCOORD_RANK": "1"}, flags={"group.world_size": 2})).splitlines()
    assert "rank: 1  # KVCOORD_RANK" in lines
    assert "  world_size: 2  # flag group.world_size" in lines
    assert "  tp: 2  # derived" in lines
    assert "  page_tokens: 64  # default" in lines
