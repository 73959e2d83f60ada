"""These tests need SGLang: `scripts/test-sglang` runs them in an environment of their own."""

import importlib
from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("sglang") else ["*.py"]

if find_spec("sglang"):
    # Puts the stand-ins for GPU packages into place before any test imports sglang.
    importlib.import_module("tests.sglang.engine")
