"""System shared memory behind a gateway: one registration for all workers, now and later."""
