"""Which worker gets a request: the modes, and the pure functions that they are made of. No I/O and no threads."""
