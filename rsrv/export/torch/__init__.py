"""The PyTorch front end: torch.export, our lowering of its graph to StableHLO, and the proof that both agree.

The only package of rsrv that imports torch; `rsrv.export.bundle` loads it when a PyTorch model is exported.
"""
