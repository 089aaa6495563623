"""Calls a function as soon as a module has been imported, or immediately if the module is already imported."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class _Finder(MetaPathFinder):
    """Wraps the loader that another finder returns for a module with a hook."""

    def __init__(self) -> None:
        self.hooks: dict[str, Callable[[ModuleType], object]] = {}
        self._searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._searching or fullname not in self.hooks:
            return None
        self._searching = True
        try:
            spec = find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(Loader):
    def __init__(self, inner: Loader, finder: _Finder) -> None:
        self._inner, self._finder = inner, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        hook = self._finder.hooks.pop(module.__name__, None)
        if hook is not None:
            hook(module)


_finder = _Finder()


def when_imported(name: str, hook: Callable[[ModuleType], object]) -> None:
    """Calls `hook(module)` when the module with this name has been executed. A name has at most one hook. Errors of the
    hook propagate out of the import."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        hook(loaded)
        return
    _finder.hooks[name] = hook
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def cancel_import_hook(name: str) -> None:
    """Removes the hook of that module."""
    _finder.hooks.pop(name, None)
