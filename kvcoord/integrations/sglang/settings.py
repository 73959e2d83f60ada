"""Settings of the group, from the environment: SGLang has no place for a plug-in's own flags.

KVCOORD_COORDINATORS names coordinators that run elsewhere (as JSON or comma separated), KVCOORD_GROUP the group,
KVCOORD_CONFIG a file with any option of `kvcoord worker`. Without coordinators rank 0 embeds one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvcoord.config import Loaded, WorkerConfig, load
from kvcoord.integrations.sglang.topology import Topology

GROUP_DEFAULT: Final = "sglang"

ROUND_TIMEOUT_DEFAULT_S: Final = 120.0
"""An engine's step may take long (a first compilation, a long prefill), on all ranks alike."""

_OURS: Final = ("KVCOORD_CONFIG", "KVCOORD_GROUP")


def read_settings(
    environment: Mapping[str, str], topology: Topology, *, lag_min: int, suffix: str
) -> Loaded[WorkerConfig]:
    """The configuration of this rank. Raises ConfigError for values that cannot work.

    `lag_min`: how far the stages of this engine run apart. `suffix` tells the groups of one engine apart.
    """
    file = environment.get("KVCOORD_CONFIG")
    rest = {name: value for name, value in environment.items() if name not in _OURS}
    path = Path(file) if file else None
    flags: dict[str, Any] = {
        "rank": topology.rank,
        "group.world_size": topology.world_size,
        "group.tp": topology.tp,
        "group.pp": topology.pp,
        "group.cp": topology.cp,
    }
    found = load(WorkerConfig, file=path, environment=rest, flags=flags)
    name = environment.get("KVCOORD_GROUP")
    if name is None:
        name = found.config.group.name if "group.name" in found.sources else GROUP_DEFAULT
    flags["group.name"] = name + suffix
    if "group.lag" not in found.sources:
        flags["group.lag"] = lag_min
    if "timeouts.round_timeout_s" not in found.sources:
        flags["timeouts.round_timeout_s"] = ROUND_TIMEOUT_DEFAULT_S
    return load(WorkerConfig, file=path, environment=rest, flags=flags)
