"""Every option of kvcoord: what it is, its default, where its value came from.

The structs check themselves when they are made, so a configuration that exists is a valid one. `load` fills them from a
file, the environment and flags; `resolved` and `explain` print them. This package knows no process that uses it.
"""

from kvcoord.config.explain import Option, explain
from kvcoord.config.group import AgreementMode, EvictionPolicy, GroupConfig, PoolConfig, PoolKind, group_fingerprint
from kvcoord.config.limits import Limits
from kvcoord.config.load import Loaded, load
from kvcoord.config.process import CoordinatorConfig, CopiesConfig, CopyEngineKind, LogFormat, LogLevel, WorkerConfig
from kvcoord.config.resolved import resolved
from kvcoord.config.timeouts import Timeouts

__all__ = [
    "AgreementMode",
    "CoordinatorConfig",
    "CopiesConfig",
    "CopyEngineKind",
    "EvictionPolicy",
    "GroupConfig",
    "Limits",
    "Loaded",
    "LogFormat",
    "LogLevel",
    "Option",
    "PoolConfig",
    "PoolKind",
    "Timeouts",
    "WorkerConfig",
    "explain",
    "group_fingerprint",
    "load",
    "resolved",
]
