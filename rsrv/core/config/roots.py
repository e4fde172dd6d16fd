"""`Root`: what tells the configuration of one kind of process from another's: its keys, variables and older names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rsrv.core.config.sections import Section, ServerConfig


@dataclass(frozen=True, eq=False)
class Root:
    """A tree of keys and the names under which files and the environment know them.

    Attributes:
        name: of the kind of process, in texts.
        model: the keys.
        env_prefix, alias_prefix: of the variables, and of those that an older system had.
        schema_command: what lists the keys.
        separator: between the entries of a list in a variable.
        variables: dotted key → end of its variable, where that is not the key.
        older_variables: end of a variable of the older system → dotted key, where that is not the same.
        aliases: end of an older name of a variable, under both prefixes → dotted key.
        other_variables: ends of variables with the prefix that are no keys.
        renamed: section → {older key → key}.
        removed: paths of keys that no longer exist → what replaces each.
        not_yet: paths of keys that a later version will have → what is to be said about that.
        required: keys without which nothing works.
        json_keys: sections with names that one variable sets as a whole, as JSON.
        lenient: keys for which a variable that cannot be used counts as none.
    """

    name: str
    model: type[Section]
    env_prefix: str
    alias_prefix: str
    schema_command: str
    separator: str = ":"
    variables: Mapping[str, str] = field(default_factory=dict)
    older_variables: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    other_variables: frozenset[str] = frozenset()
    renamed: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    removed: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    not_yet: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    json_keys: frozenset[str] = frozenset()
    lenient: frozenset[str] = frozenset()

    def variable(self, path: tuple[str, ...]) -> str:
        """The variable of the key at `path`."""
        return self.env_prefix + (self.variables.get(".".join(path)) or "_".join(path).upper())


WORKER = Root(
    "worker",
    ServerConfig,
    env_prefix="RSRV_WORKER_",
    alias_prefix="INFERENCE_SERVER_",
    schema_command="rsrv config schema --keys",
    older_variables={"ENDPOINTS_PORT": "endpoints.grpc_port", "ENDPOINTS_METRICS_PORT": "endpoints.http_port"},
    other_variables=frozenset({"NAME", "THREADS"}),
    renamed={"endpoints": {"port": "grpc_port", "metrics_port": "http_port"}},
    removed={
        ("batch_policy",): "scheduler.models.<name>.max_batch_size",
        ("runtime", "residency_mode"): "model_control_mode",
    },
    required=frozenset({"model_dirs"}),
)
