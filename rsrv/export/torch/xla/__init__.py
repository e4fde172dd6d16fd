"""The other lowering: torch-xla, in an environment of its own that the user names; our process never imports it."""
