"""The file that says what to convert: its keys, checked, with paths resolved against the file's directory (X-41)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from rsrv.bundle.files import is_passing, name_problem
from rsrv.core.config.keys import closest, leaves
from rsrv.core.config.problems import config_error
from rsrv.core.config.sections import Name, NotNegative, Positive, PositiveSeconds, Section
from rsrv.core.errors import ConfigError
from rsrv.core.yamlio import YamlError, load_yaml

_PATH_SUFFIXES = ("_dir", "_path")


class ExcludeEntry(Section):
    """A model that is not converted."""

    reason: Name
    """Why the model is not converted; the report says so."""
    remove_existing: bool = False
    """Delete a bundle that an earlier run has made of it."""


class HandlerEntry(Section):
    """Python code that makes the bundles of some models."""

    file: Name
    """Python file that defines `handler(ctx)`."""
    models: Annotated[list[Name], Field(min_length=1)]
    """Names of the models that it converts; they need no source directory."""
    options: dict[str, Any] = Field(default={})
    """Whatever the handler wants to know. Texts under keys that end in `_dir` or `_path` are paths."""


class ConvertFile(Section):
    """The keys of the file."""

    source_dirs: list[Name] = Field(default=[])
    """Model repositories in Triton's layout, each a directory of models. Optional when there are handlers."""
    output_root: Name
    """Directory that the bundles go to."""
    report_path: Name
    """The report, in Markdown; the same as JSON is written beside it, under the suffix `.json`."""
    exclude: dict[Name, ExcludeEntry] = Field(default={})
    """Models that are not converted, each with the reason."""
    handlers: list[HandlerEntry] = Field(default=[])
    """Python files that convert some of the models in their own way."""
    golden: NotNegative = 0
    """How many samples with PyTorch's own answers each bundle carries (models without a handler)."""
    timeout_seconds: PositiveSeconds = 3600.0
    """Wall time that one attempt at a model may take."""
    memory_bytes: Positive | None = None
    """Private memory that one attempt at a model may take. Unset: no limit."""


@dataclass(frozen=True)
class Exclusion:
    reason: str
    remove_existing: bool


@dataclass(frozen=True)
class Handler:
    """A handler file with its options; paths among them are absolute."""

    file: Path
    models: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class ConvertConfig:
    """A file of `ConvertFile` that holds; all paths are absolute."""

    path: Path
    source_dirs: tuple[Path, ...]
    output_root: Path
    report_path: Path
    exclude: Mapping[str, Exclusion]
    handlers: tuple[Handler, ...]
    golden: int = 0
    timeout_seconds: float = 3600.0
    memory_bytes: int | None = None

    @property
    def json_path(self) -> Path:
        """Where the report goes as JSON."""
        return self.report_path.with_suffix(".json")

    def handler_of(self, model: str) -> Handler | None:
        return next((handler for handler in self.handlers if model in handler.models), None)


def load_convert_config(path: str | Path) -> ConvertConfig:
    """Read and check the file. Raises ConfigError that names file, key and value."""
    path = Path(path).absolute()
    try:
        keys = ConvertFile.model_validate(_read(path))
    except ValidationError as error:
        raise config_error(error, where=str(path), wanted=_wanted, suggest=_suggest) from None
    here = path.parent
    config = ConvertConfig(
        path=path,
        source_dirs=tuple(here / source for source in keys.source_dirs),
        output_root=here / keys.output_root,
        report_path=here / keys.report_path,
        exclude={model: Exclusion(entry.reason, entry.remove_existing) for model, entry in keys.exclude.items()},
        handlers=tuple(
            Handler(here / entry.file, tuple(entry.models), _resolved(entry.options, here)) for entry in keys.handlers
        ),
        golden=keys.golden,
        timeout_seconds=keys.timeout_seconds,
        memory_bytes=keys.memory_bytes,
    )
    _check(config)
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        root = load_yaml(path.read_bytes(), what=str(path))
    except OSError as error:
        raise ConfigError(f"{path}: the file cannot be read: {error.strerror}") from None
    except YamlError as error:
        raise ConfigError(error.message) from None
    if not isinstance(root, Mapping):
        found = "nothing" if root is None else f"a {type(root).__name__}"
        raise ConfigError(f"{path}: wanted a mapping with output_root, report_path and more; the file holds {found}")
    return {str(key): value for key, value in root.items() if not str(key).startswith("x-")}


def _resolved(options: Mapping[str, Any], here: Path) -> dict[str, Any]:
    return {
        key: str(here / value) if isinstance(value, str) and key.endswith(_PATH_SUFFIXES) else value
        for key, value in options.items()
    }


def _check(config: ConvertConfig) -> None:
    """What the types of the keys do not say. Raises ConfigError."""

    def refuse(text: str, hint: str | None = None) -> ConfigError:
        return ConfigError(f"{config.path}: {text}", hint=hint)

    if not config.source_dirs and not config.handlers:
        raise refuse("there is nothing to convert: neither source_dirs nor handlers has an entry")
    for i, source in enumerate(config.source_dirs):
        if not source.is_dir():
            raise refuse(f"source_dirs[{i}]: {str(source)!r} is not an existing directory")
    places: dict[Path, int] = {}
    for i, source in enumerate(config.source_dirs):
        if (first := places.setdefault(source.resolve(), i)) != i:
            raise refuse(f"source_dirs[{i}]: {str(source)!r} is source_dirs[{first}] once more")
    out = config.output_root.resolve()
    for place, i in places.items():
        if place in (out, out.parent):
            raise refuse(
                f"output_root: {str(config.output_root)!r} lies in source_dirs[{i}], where every directory is a model",
                "name a directory elsewhere",
            )
    if config.output_root.exists() and not config.output_root.is_dir():
        raise refuse(f"output_root: {str(config.output_root)!r} is not a directory")
    if config.report_path.suffix == ".json":
        raise refuse(
            f"report_path: {str(config.report_path)!r} ends in .json, where the report goes as JSON",
            hint="name the Markdown file, for example report.md",
        )
    for what in (config.report_path, config.json_path):
        if what.is_dir():
            raise refuse(f"report_path: {str(what)!r} is a directory, wanted a file")
    owners: dict[str, int] = {}
    for i, handler in enumerate(config.handlers):
        if not handler.file.is_file():
            raise refuse(f"handlers[{i}].file: {str(handler.file)!r} does not exist")
        if handler.file.suffix != ".py":
            raise refuse(f"handlers[{i}].file: {str(handler.file)!r} is no Python file; wanted a name that ends in .py")
        for model in handler.models:
            problem = name_problem(model) or ("marks a file that servers skip" if is_passing(model) else None)
            if problem is not None:
                raise refuse(f"handlers[{i}].models: no bundle can be called {model!r}: the name {problem}")
            if model in owners:
                raise refuse(f"handlers[{i}].models: {model!r} is a model of handlers[{owners[model]}], too")
            owners[model] = i
            if model in config.exclude:
                raise refuse(f"handlers[{i}].models: {model!r} is excluded: {config.exclude[model].reason}")


def _wanted(path: tuple[str, ...]) -> tuple[str, str] | None:
    top = {leaf.path[0]: leaf.type_text for leaf in leaves(ConvertFile)}
    if path[0] == "handlers" and len(path) > 1:
        types = {leaf.key: leaf.type_text for leaf in leaves(HandlerEntry)}
        place = f"handlers[{path[1]}]"
        if len(path) > 2 and path[2] in types:
            return f"{place}.{path[2]}", types[path[2]]
        return place, "a mapping with file and models"
    if path[0] == "exclude":
        types = {leaf.key: leaf.type_text for leaf in leaves(ExcludeEntry)}
        if len(path) > 2 and path[2] in types:
            return ".".join(path[:3]), types[path[2]]
        return ".".join(path[:2]), "a mapping of models, each with a reason"
    if path[0] == "handlers":
        return "handlers", "a list of mappings with file and models"
    return (path[0], top[path[0]]) if path[0] in top else None


def _suggest(path: Sequence[str]) -> str | None:
    section: type[Section] = ConvertFile
    if len(path) > 1:
        section = HandlerEntry if path[0] == "handlers" else ExcludeEntry
    return closest(path[-1], section.model_fields)
