"""Transcripts under `testdata`: what is said and done in each situation, to the message.

With KVCOORD_REWRITE=1 in the environment the files are rewritten; review the difference.
"""

import os
from pathlib import Path

import pytest

from tests.protocol.transcript import replay_file

TRANSCRIPTS = sorted((Path(__file__).parent / "testdata").glob("*.txt"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_the_machines_do_what_the_transcript_says(path: Path) -> None:
    expected, found = replay_file(path)
    if os.environ.get("KVCOORD_REWRITE") == "1":
        path.write_text(found)
        return
    assert found == expected


def test_there_are_transcripts() -> None:
    assert len(TRANSCRIPTS) >= 10
