"""The peer that a replay is compared with: ranks that agree by a blocking all_reduce(MIN), as engines do without kvcoord.

`GlooConsensus` is one more way for the cache logic to learn what all ranks can do: every decision is a collective on
the thread that serves the engine, and copies end in order of submission, as many as have ended on all ranks. The rest
of the worker is the same. Run as `python -m kvcoord.load.gloo CONFIG STORE`, one process for each rank; the ranks find
each other through the file STORE. Needs torch, which no other part of a replay does.
"""

import asyncio
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from kvcoord.config.load import load
from kvcoord.config.process import WorkerConfig
from kvcoord.controller.assembly import make_machine
from kvcoord.controller.operations import Operation, Phase
from kvcoord.controller.tiers import TierPools
from kvcoord.controller.worker import WorkerMachine
from kvcoord.domain import Agreement, OperationId, Outcome, Reason, Tier
from kvcoord.errors import UsageError
from kvcoord.protocol.messages import Ack, Completion, Decision, Vote

NOBODY: Final = 1 << 30
"""Larger than any rank, reason or position."""

REASONS: Final = tuple(Reason)
