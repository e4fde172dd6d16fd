"""Which workers there are, how they are, and which models they serve."""
