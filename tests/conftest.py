"""Makes ``tests/`` importable, so that every room can use ``from support.… import …``."""
