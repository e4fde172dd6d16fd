"""What every model needs, imported once: its process is a copy of one that has this. Nothing is started here."""

import torch._dynamo  # noqa: F401 - torch.export would import it, which takes longer than many an export

import rsrv.audit.check
import rsrv.export.torch.frontend  # noqa: F401
from rsrv.export.torch.registry import registry

registry()
