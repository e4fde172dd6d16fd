"""What the gateway answers itself: metadata, health, the index, HTTP."""
