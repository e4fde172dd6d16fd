"""The scheduler: which requests run together, on which program, and when. One execution at a time per device.

Threads
    any       `Scheduler.submit` checks the request, appends it to its model's queue and returns a `Ticket`.
    dispatch  The only thread that takes requests off a queue. Each turn: a free device gets work first, then finished
              batches are cut up and delivered, then one look-ahead batch is staged while a launch is outstanding.
    device    Takes the staged batch when the device is free, owns the one outstanding `Launch`, waits for its result.
              A program known to be quick is launched by the dispatch thread itself: hand-overs would cost more.
    watchdog  Looks now and then whether the outstanding execution takes too long, and says so.
    Dispatch and device sleep on a lock as a bell, without polling: an idle worker uses no CPU. One lock guards all
    state; it is held to enqueue, choose, hand over and count, never across staging, device work or a `done` callback.

States of a request
    queued    In `ModelQueue.tickets`. Cancelled or expired ones leave it whenever the next dispatch is chosen.
    staged    Merged into 64-byte aligned blocks, in the one slot before the device. Until the launch it can come back:
              the batch grows with requests that fit, gives way to an earlier deadline (edf), is dropped with its model,
              or is rejected.
    running   Deadline and cancellation were looked at once more; now nothing stops it.
    settled   `done` was called, exactly once: outputs, or the error of the dispatch or of the drop.

Versions of a model
    A load of a model is an incarnation and has a queue of its own, so no batch mixes versions. `replace` puts a new one
    beside the old, which accepts what was prepared for it until it is retired (`closed`), and is forgotten when the
    last of its requests is settled. What belongs to the name is in its `Account`: both are charged to it and chosen as
    one, the older request first. `set_programs` exchanges the executables of an incarnation between two launches.

The choice
    Which model   `select`, by the discipline: `fair` (accounts in `shares`), `fifo` or `edf`. A model whose batching
                  window is open waits for company until the window closes, a batch is full or a deadline gets near.
    Which batch   `plan`: a leading run of requests of one shape, perhaps past requests of other shapes, on the batch
                  size that makes all queued rows cheapest by the measured `costs`.

A merged dispatch that fails, with anything but a `DeviceError`, is re-run request by request once, so that one bad
request fails alone. Blocks go back to the pool only after the launch ended and its input buffers were freed, because
the CPU device computes straight from them; results never alias inputs.

`plan`, `select`, `shares`, `costs`, `ModelQueue`, `Roster` and `Backlog` are pure (no threads, time passed in);
`Dispatcher`, `Launcher` and `Watchdog` are the thin shell, `Scheduler` is its face.
"""

from rsrv._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "BatchReport": ".stats",
        "ModelPolicy": ".policy",
        "ModelStats": ".stats",
        "Policy": ".policy",
        "Result": ".queue",
        "Sample": ".tap",
        "Scheduler": ".scheduler",
        "ServableModel": ".model",
        "Stuck": ".watchdog",
        "Ticket": ".queue",
    },
)
