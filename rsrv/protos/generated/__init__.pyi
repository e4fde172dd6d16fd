"""Type stubs of the generated messages; nothing here is importable at run time."""
