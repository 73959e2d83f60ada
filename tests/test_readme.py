"""The README's client code is run as it stands there, against a real worker in a group of one."""

import asyncio
import contextlib
import io
import re
from pathlib import Path

from tests.runtime.groups import group

README = Path(__file__).parent.parent / "README.md"


def client_code() -> str:
    found = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert found, "README.md has its client code in a block marked python"
    return found[1]


async def test_the_client_code_of_the_readme_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    async with group(tmp_path, world_size=1) as alone:
        code = client_code().replace("ipc:///run/kvcoord/rank0.sock", alone.address(0))
        names: dict[str, object] = {}
        exec(compile(code.replace("asyncio.run(main())", ""), "README.md", "exec"), names)
        main = names["main"]
        assert callable(main)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            await asyncio.wait_for(main(), timeout=60)
    lines = printed.getvalue().splitlines()
    assert lines[0].startswith("Committed(")
    assert lines[1] == "Match(device_pages=4, host_pages=0)"
    assert lines[2] == "b'hello'"
