"""Weight residency: which weights are on the device, and how they come and go within a budget.

States of a model's weights
    cold      Not on the device; in a host copy or in the file. Its requests wait, the others go on.
    loading   Their place in the budget is taken, the transfer thread moves them; one load at a time.
    resident  Batches may use them. Those of the pinned reserve stay; the others leave when room is needed, the least
              recently used or the cheapest to have again first. What is in use leaves when that ends.

Parts
    floors    The tier that weights never leave, and what a change of it moves.
    ledger    The books: budget, who leaves for whom, counters. Pure, as are `holdings` (bytes that models share count
              once), `eviction` (rates, worth, victims) and `ghosts` (the budget that one would need).
"""

from rsrv._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Floor": ".floors",
        "FloorChange": ".floors",
        "Ledger": ".ledger",
        "LedgerSnapshot": ".snapshot",
        "ModelState": ".snapshot",
        "Plan": ".ledger",
        "State": ".snapshot",
        "resolve_floor": ".floors",
    },
)
