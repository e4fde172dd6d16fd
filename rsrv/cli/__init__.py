"""The command line: one module per command group, thin, with nothing heavy at import.

A command's module imports only typer and `rsrv.cli.output` at its top; bodies import what they need. A command never
prints by itself and never calls ``sys.exit``: data goes through `output`, failures are raised as `RsrvError`.
"""
