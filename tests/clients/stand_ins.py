"""Stand in for packages that MaxText, Tunix and Levanter import, and of which a small
training run uses nothing.
"""

import importlib.abc
import importlib.machinery
import sys
import types

# Tokenizers, readers of data sets, quantization, kernels of TPUs, clusters, tables and
# pictures: 1.5 GB with what they need.
UNUSED = (
    "PIL", "aqt", "datasets", "deepdiff", "drjax", "finelog", "finestore", "fray", "git", "grain", "humanfriendly",
    "iris", "metrax", "ml_collections", "pandas", "pathwaysutils", "perfetto", "pyarrow", "pytimeparse", "qwix",
    "requests", "rigging", "sentencepiece", "sympy", "tblib", "tiktoken", "tokamax", "tokenizers", "transformers",
    "wandb", "zephyr",
)  # fmt: skip


class _Anything(type):
    """A class that has any attribute, may be a base class, and stands in annotations."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (Nothing,), {})

    def __or__(cls, other):
        return object

    __ror__ = __or__


class Nothing(metaclass=_Anything):
    """Can be made of anything, and as a decorator it returns what it decorates."""

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return args[0] if args else self

    __getattr__ = lambda self, name: self


class _Package(types.ModuleType):
    __version__ = "99.0"

    def __getattr__(self, name):
        return getattr(Nothing, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        is_unused = fullname.partition(".")[0] in UNUSED
        return (
            importlib.machinery.ModuleSpec(fullname, self, is_package=True)
            if is_unused
            else None
        )

    def create_module(self, spec):
        return _Package(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())  # behind all others: what is installed is imported
