"""What the gateway counts, and one scrape for itself and all of its workers."""
