"""The workers as the gateway sees them: connections, slots, readiness, reports."""
