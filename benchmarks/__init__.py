"""Side-by-side measurements. They print ratios and medians of one run and are never part of the tests' verdict."""
