"""The watcher: what changes in the model directories, when it has settled, and what is done about it.

`snapshot` looks, `diff` and `settling` decide (pure, time passed in), `contents` hashes what only seems to differ,
`follower` remembers what is served and applies changes, `events` shortens the wait, `watcher` is the thread.
"""
