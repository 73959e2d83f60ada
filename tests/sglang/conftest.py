"""These tests need SGLang: `scripts/test-sglang` runs them in an environment of their own."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("sglang") else ["*.py"]
