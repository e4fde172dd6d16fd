"""``make soak``: a real server under random, hostile and dying clients; every answer is compared with a reference."""
