"""What can be proved about a bundle without trusting it: signatures, digests, layout, hooks, and its numbers."""

from rsrv._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "ArityReport": ".arity",
        "AuditProcess": ".process",
        "BundleDiff": ".diff",
        "CheckReport": ".findings",
        "Difference": ".diff",
        "Conversion": ".convert",
        "Finding": ".findings",
        "ModuleArity": ".arity",
        "ParityReport": ".parity",
        "ParityRow": ".parity",
        "Skipped": ".findings",
        "TOLERANCES": ".parity",
        "VerifyReport": ".verify",
        "assert_bundle_arity": ".arity",
        "bundle_arity_report": ".arity",
        "bundle_entry_arity": ".arity",
        "bundle_gate": ".gate",
        "check_bundle": ".check",
        "convert_bundle": ".convert",
        "check_signature": ".signature",
        "compare": ".parity",
        "diff_bundles": ".diff",
        "parse_pool": ".programs",
        "require_signature": ".signature",
        "to_junit": ".junit",
        "verify_bundle": ".verify",
    },
)
