"""What operators see and change while the gateway runs: scheduling, members, memory; and what outlives a restart."""
