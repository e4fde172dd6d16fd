"""The hooks of a bundle under audit: imported and run here, so only ever in a process that may die."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from rsrv.bundle.directory import Bundle
from rsrv.core.errors import HookError, HookRejected
from rsrv.runtime.hooks import Hooks, call_hook, load_hooks


class BundleHooks:
    """``preprocess`` and ``postprocess`` of `bundle`, imported with the first question."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle

    def has(self, role: str) -> bool:
        return getattr(self._loaded, role) is not None

    def call(self, role: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What the hook makes of `arrays`; without one, `arrays`.

        Raises HookError with the hook's own words: who reads them is the author of the bundle, not a client of it.
        """
        hook = getattr(self._loaded, role)
        if hook is None:
            return dict(arrays)
        try:
            return call_hook(hook, arrays, model=self._bundle.name, role=role)
        except HookRejected as error:
            raise HookError(f"hook {role} of model {self._bundle.name!r} rejected it: {error.message}") from error
        except HookError as error:
            cause = error.__cause__
            raise HookError(error.message if cause is None else f"{error.message}: {cause}") from error

    @cached_property
    def _loaded(self) -> Hooks:
        path = self._bundle.hooks_path
        return Hooks() if path is None else load_hooks(path, name=self._bundle.name, incarnation=0)
