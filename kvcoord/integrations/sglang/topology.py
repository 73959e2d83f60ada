"""Where this rank stands among those that must agree, read from SGLang's own process groups.

The only collective that kvcoord uses is here: at start-up rank 0 tells the others a short text over those groups.
"""

import os
import secrets
from pathlib import Path
from typing import Any, Final

import msgspec
import torch.distributed as dist

from kvcoord.errors import UsageError
from kvcoord.runtime.directory import private_directory

Groups = list[Any]
"""Process groups of torch, the innermost first."""

_SOCKET: Final = "sglang-{token}.sock"


class Topology(msgspec.Struct, frozen=True):
    """One rank of the group of ranks that share one scheduler's decisions: pp x cp x tp."""

    rank: int
    tp: int
    cp: int
    pp: int

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.pp


def read_topology(params: Any) -> Topology:
    """From SGLang's CacheInitParams. Ranks are numbered stage by stage, in a stage context by context."""
    tp_group, cp_group = _stage_groups(params)
    tp, tp_rank = _shape(tp_group)
    cp, cp_rank = _shape(cp_group)
    pp = params.pp_size if params.pp_cache_group is not None else 1
    pp_rank = params.pp_rank if pp > 1 else 0
    return Topology((pp_rank * cp + cp_rank) * tp + tp_rank, tp, cp, pp)


def share(text: str, params: Any) -> str:
    """Rank 0's text, on every rank: along each stage first, then from the first stage to the others."""
    pipeline = params.pp_cache_group if params.pp_size > 1 else None
    for group in (*_stage_groups(params), pipeline):
        if group is not None and dist.get_world_size(group=group) > 1:
            box = [text]
            dist.broadcast_object_list(box, group=group, group_src=0)
            text = box[0]
    return text


def embedded_address(topology: Topology, params: Any) -> str:
    """Where rank 0's embedded coordinator serves: a socket in a folder that only this user can enter.

    Raises UsageError on a rank that cannot see that folder, since it then runs on another host.
    """
    mine = private_directory() / _SOCKET.format(token=secrets.token_hex(8)) if topology.rank == 0 else Path()
    path = Path(share(str(mine), params))
    if not os.access(path.parent, os.X_OK):
        fix = (
            f"rank {topology.rank} cannot reach rank 0's embedded coordinator at {path}, so it runs on another host or"
            " under another user: start `kvcoord coordinator` and name it in KVCOORD_COORDINATORS on every rank"
        )
        raise UsageError("coordinators", "embedded", fix)
    return f"unix://{path}"


def _stage_groups(params: Any) -> tuple[Any, Any]:
    """The tensor-parallel and the context-parallel group of this stage, as SGLang reduces over them."""
    inner = (params.attn_tp_cache_group, params.attn_cp_cache_group)
    if any(group is not None and dist.get_world_size(group=group) > 1 for group in inner):
        return inner
    return params.tp_cache_group, None


def _shape(group: Any) -> tuple[int, int]:
    """Ranks in a group, and which one this is."""
    if group is None:
        return 1, 0
    return dist.get_world_size(group=group), dist.get_rank(group=group)
