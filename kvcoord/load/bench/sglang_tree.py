"""SGLang's tree core as a peer of the index. Run by an interpreter that has SGLang, not kvcoord:

    PYTHONPATH=HARNESS python sglang_tree.py rust|python PATH_PAGES PAGES

HARNESS is the folder of `sgl_cpu_harness`, which builds SGLang's cache without a GPU. Prints one line of JSON.
"""

import json
import sys
import time
from array import array
from statistics import median
from typing import Any

PAGE_TOKENS = 64
ACTS = 40


def main(core: str, path_pages: int, pages: int) -> None:
    """Times matches of a cached path and inserts of a new one."""
    import sgl_cpu_harness as harness  # type: ignore[import-not-found]
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    tokens = path_pages * PAGE_TOKENS
    cached = max(pages // path_pages, 1)
    cache, _, _ = harness.build(
        tree_core=core, page_size=PAGE_TOKENS, kv_size=PAGE_TOKENS * 64, write_policy="write_back", layer_num=1
    )

    def key(number: int) -> Any:
        first = number * tokens
        return RadixKey(array("q", range(first, first + tokens)))

    values = harness.torch.arange(tokens)

    def insert(number: int) -> None:
        cache.insert(InsertParams(key=key(number), value=values))

    for number in range(cached):
        insert(number)
    match_us = [timed(cache.match_prefix, MatchPrefixParams(key=key(number % cached))) for number in range(ACTS)]
    insert_us = [
        timed(cache.insert, InsertParams(key=key(number), value=values)) for number in range(cached, cached + ACTS)
    ]
    times = {"core": core, "pages": cached * path_pages, "match_us": median(match_us), "insert_us": median(insert_us)}
    print(json.dumps(times))


def timed(act: Any, argument: Any) -> float:
    """Microseconds of one call."""
    begun = time.perf_counter_ns()
    act(argument)
    return (time.perf_counter_ns() - begun) / 1000


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
