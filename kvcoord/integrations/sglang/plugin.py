"""The entry point: registers `kvcoord` as a radix-cache backend of SGLang.

SGLang loads it in every process and swallows what it raises, so nothing is checked here. Everything is checked when a
scheduler builds its cache: what is wrong then ends the engine with a sentence.
"""

from typing import Any, Final

from sglang.srt.mem_cache.registry import create_unified_radix_cache, register_radix_cache_backend

from kvcoord.integrations.sglang.contract import check_contract
from kvcoord.integrations.sglang.support import refuse_before_building

BACKEND: Final = "kvcoord"


def register() -> None:
    """Makes `--radix-cache-backend kvcoord` known."""
    register_radix_cache_backend(BACKEND, build)


def build(context: Any) -> Any:
    """The cache of one scheduler.

    Raises UsageError when SGLang's version, one of the hooks or the configuration is not supported.
    """
    check_contract()
    refuse_before_building(context)
    # SGLang loads plug-ins before it has set up what its cache module needs.
    from kvcoord.integrations.sglang.cache import KvcoordRadixCache

    return create_unified_radix_cache(context, cache_class=KvcoordRadixCache)
