"""Many items through one model: what the drivers take, how items become requests, and maps over arrays and iterators.

Everything here is one course of steps (`course`) with a face for threads and one for event loops.
"""
