"""What there is to convert, under which name, by whom, and what of it is there already. Nothing is converted here."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rsrv.bundle.directory import Bundle, inspect_bundle
from rsrv.core.errors import ExportError, UsageError
from rsrv.export.repository.config import ConvertConfig, Exclusion, Handler
from rsrv.export.repository.triton import find_model_file, obstacle, read_triton_model


@dataclass(frozen=True)
class WorkItem:
    """One bundle to make.

    Attributes:
        model: the model's name, that of its source directory.
        bundle: name of the bundle; differs from `model` where an earlier source has a model of that name.
        source: the model's directory, or None when only a handler knows it.
        target: where the bundle goes.
    """

    model: str
    bundle: str
    source: Path | None
    target: Path
    exclusion: Exclusion | None = None
    handler: Handler | None = None

    @property
    def disposition(self) -> Literal["excluded", "handler", "generic"]:
        return "excluded" if self.exclusion else "handler" if self.handler else "generic"


def plan(config: ConvertConfig) -> list[WorkItem]:
    """The worklist (X-42): the directories of each source by name, then models that only a handler knows."""
    sources = [source for root in config.source_dirs for source in _models_in(root)]
    names = {source.name for source in sources}
    given = names | {model for handler in config.handlers for model in handler.models}
    taken: set[str] = set()
    items = []
    for source in sources:
        bundle = source.name if source.name not in taken else _free_name(source.name, taken | given)
        taken.add(bundle)
        items.append(_item(config, source.name, bundle, source))
    for handler in config.handlers:
        items += [_item(config, model, model, None) for model in handler.models if model not in names]
    return items


def select(items: Sequence[WorkItem], only: Sequence[str]) -> list[WorkItem]:
    """The items that `only` names by model or bundle; all without `only`. Raises UsageError for an unknown name."""
    known = {name for item in items for name in (item.model, item.bundle)}
    for name in only:
        if name not in known:
            close = difflib.get_close_matches(name, sorted(known), n=1)
            raise UsageError(
                f"--only names {name!r}, which is neither a model nor a bundle of the worklist",
                hint=f"did you mean {close[0]!r}?" if close else "`--dry-run` shows the worklist",
            )
    return [item for item in items if not only or item.model in only or item.bundle in only]


def present(target: Path) -> Bundle | None:
    """The bundle at `target` when it needs no conversion (X-46): a manifest, and weights and programs or a meta.

    Of whatever form: variants, single programs, dynamic batches. Whether all is well with it, `bundle check` says.
    """
    if not target.is_dir():
        return None
    bundle, _ = inspect_bundle(target)
    if bundle is None or bundle.manifest.is_meta:
        return bundle
    return bundle if bundle.weights_path is not None and bundle.program_files() else None


def outlook(item: WorkItem) -> str:
    """In a few words, what a conversion would do, as far as can be told without running anything."""
    if item.exclusion is not None:
        removed = "; an existing bundle is removed" if item.exclusion.remove_existing else ""
        return f"{item.exclusion.reason}{removed}"
    if item.handler is not None:
        return str(item.handler.file)
    assert item.source is not None  # without a handler, a directory is where the model comes from
    try:
        model = read_triton_model(item.source)
        if (found := obstacle(model)) is not None:
            return f"will {'fail' if found[0] == 'failed' else 'be skipped'}: {found[1]}"
        find_model_file(item.source, model)
    except ExportError as error:
        return f"will fail: {error.message}"
    return f"batch sizes {', '.join(map(str, model.ladder))}" if model.ladder else "no batch axis"


def unknown_exclusions(config: ConvertConfig, items: Sequence[WorkItem]) -> list[str]:
    """Names in ``exclude`` that no model has: most likely a slip of the pen."""
    return sorted(set(config.exclude) - {item.model for item in items})


def _models_in(root: Path) -> list[Path]:
    return sorted((path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")), key=str)


def _free_name(model: str, taken: set[str]) -> str:
    number, name = 1, f"{model}__dynamic"
    while name in taken:
        number += 1
        name = f"{model}__dynamic{number}"
    return name


def _item(config: ConvertConfig, model: str, bundle: str, source: Path | None) -> WorkItem:
    return WorkItem(
        model=model,
        bundle=bundle,
        source=source,
        target=config.output_root / bundle,
        exclusion=config.exclude.get(model),
        handler=config.handler_of(model),
    )
