"""What can be proved about a bundle without trusting it: signatures, digests, layout, hooks (compiled, not run)."""

from rsrv._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "ArityReport": ".arity",
        "CheckReport": ".findings",
        "Finding": ".findings",
        "ModuleArity": ".arity",
        "Skipped": ".findings",
        "assert_bundle_arity": ".arity",
        "bundle_arity_report": ".arity",
        "bundle_entry_arity": ".arity",
        "bundle_gate": ".gate",
        "check_bundle": ".check",
        "check_signature": ".signature",
        "parse_pool": ".programs",
        "require_signature": ".signature",
        "to_junit": ".junit",
    },
)
