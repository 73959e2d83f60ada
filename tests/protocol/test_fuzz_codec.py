"""A short run of the coverage-guided fuzzer; `scripts/fuzz_codec` runs it for longer."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvcoord.protocol.codec import encode
from kvcoord.protocol.messages import Ack, FetchEntries, Frame, Heartbeat, Hello, StreamVote, Vote

REPOSITORY = Path(__file__).resolve().parents[2]

RUNS = 20_000

SEEDS = (
    Hello(1, "g", 0, 2, 7, 1, 0, {"dtype": "bf16"}),
    Heartbeat(3, 4, 5),
    StreamVote(3, Vote("op", "custom", True)),  # type: ignore[arg-type]
    Frame(3, 1, [], [Ack("op", True)], [1, 2], 9),
    FetchEntries(3, 2),
)


@pytest.mark.skipif(find_spec("atheris") is None, reason="atheris cannot be installed here: pip install kvcoord[test]")
def test_no_bytes_make_the_codec_raise_anything_but_a_frame_error(tmp_path: Path) -> None:
    for number, message in enumerate(SEEDS):
        (tmp_path / str(number)).write_bytes(bytes((0,)) + encode(message))
    finished = subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts" / "fuzz_codec"), str(tmp_path), f"-runs={RUNS}", "-seed=1"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert f"Done {RUNS} runs" in finished.stderr
