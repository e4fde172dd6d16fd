"""The scheduler: which requests run together, on which program, and when. One execution at a time per device.

Threads
    any       `Scheduler.submit` checks the request, appends it to its model's queue and returns a `Ticket`.
    dispatch  The only thread that takes requests off a queue. Each turn: a free device gets work first, then finished
              batches are cut up and delivered, then one look-ahead batch is staged while a launch is outstanding.
    device    Takes the staged batch when the device is free, owns the one outstanding `Launch`, waits for its result.
              A program known to be quick is launched by the dispatch thread itself: hand-overs would cost more.
    Both sleep on a lock as a bell, without polling: an idle worker uses no CPU. One lock guards all state; it is held
    to enqueue, choose, hand over and count, never across staging, device work or a `done` callback.

States of a request
    queued    In `ModelQueue.tickets`. Cancelled or expired ones leave it whenever the next dispatch is chosen.
    staged    Merged into 64-byte aligned blocks, in the one slot before the device. Until the launch it can come back:
              the batch grows with requests that fit, is dropped with its model, or is rejected.
    running   Deadline and cancellation were looked at once more; now nothing stops it.
    settled   `done` was called, exactly once: outputs, or the error of the dispatch or of the drop.

A merged dispatch that fails, with anything but a `DeviceError`, is re-run request by request once, so that one bad
request fails alone. Blocks go back to the pool only after the launch ended and its input buffers were freed, because
the CPU device computes straight from them; results never alias inputs.

`plan`, `select`, `Backlog` are pure (no threads, time passed in); `Launcher` and `Scheduler` are the thin shell.
"""

from rsrv._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "BatchReport": ".stats",
        "ModelStats": ".stats",
        "Result": ".queue",
        "Scheduler": ".dispatch",
        "ServableModel": ".model",
        "Ticket": ".queue",
    },
)
