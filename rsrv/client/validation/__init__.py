"""The dry run of a user's `InferenceIO` against what a model takes and gives; nothing is sent."""
