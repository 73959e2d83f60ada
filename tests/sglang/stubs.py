"""Makes SGLang's cache importable on a machine without a GPU: stands in for packages that its logic never executes.

`install` comes before the first import of sglang. A package that is really installed always wins over its stand-in.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

ROOTS = (
    *("triton", "sgl_kernel", "tvm_ffi"),
    *("torchvision", "PIL", "sentencepiece", "compressed_tensors", "gguf"),
    *("IPython", "aiohttp", "requests", "starlette", "partial_json_parser"),
)


class _Base:
    """What a class gets that inherits from a stand-in."""

    def __init_subclass__(cls, **_: object) -> None:
        pass


class _Anything:
    """Takes every attribute, call, index, decoration and union."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        value = self.__dict__[name] = _Anything(f"{self._name}.{name}")
        return value

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if len(arguments) == 1 and not options and callable(arguments[0]):
            return arguments[0]
        return _Anything(f"{self._name}()")

    def __getitem__(self, _: object) -> Any:
        return _Anything(f"{self._name}[]")

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False

    def __or__(self, _: object) -> Any:
        return self

    __ror__ = __or__

    def __mro_entries__(self, _: object) -> tuple[type]:
        return (_Base,)


class _StubModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        value = _Anything(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = roots

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] in self._roots:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _StubModule(spec.name)
        module.__dict__.update(__path__=[], __version__="0.0.0")
        if spec.name == "triton":
            module.__dict__.update(_triton())
        if spec.name == "triton.runtime.jit":
            module.__dict__["JITFunction"] = type("JITFunction", (), {})
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _triton() -> dict[str, Any]:
    """The few functions of triton that are called while modules load."""

    def cdiv(a: int, b: int) -> int:
        return (a + b - 1) // b

    def next_power_of_2(n: int) -> int:
        return 1 if n <= 1 else 1 << (n - 1).bit_length()

    def jit(function: Any = None, **_: object) -> Any:
        return jit if function is None else _Anything("triton.kernel")

    return {"__version__": "3.4.0", "cdiv": cdiv, "next_power_of_2": next_power_of_2, "jit": jit}


def install() -> None:
    """Puts the stand-ins into place."""
    import torch

    def uncompiled(function: Any = None, **_: object) -> Any:
        return (lambda wrapped: wrapped) if function is None else function

    # torch.compile looks at triton, of which there is only a stand-in.
    torch.compile = uncompiled
    missing = [root for root in ROOTS if not _importable(root)]
    if missing:
        sys.meta_path.append(_Finder(tuple(missing)))


def _importable(root: str) -> bool:
    try:
        __import__(root)
    except Exception:
        for name in [name for name in sys.modules if name == root or name.startswith(f"{root}.")]:
            sys.modules.pop(name, None)
        return False
    return True
