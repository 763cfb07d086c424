"""Evidence of a hang: the stacks of all threads, taken when a stall is noticed.

The contract: called from the worker or from the signal watcher, never from a hook; stacks go to the log and the recorder,
not to the page, unless the endpoint is authenticated.
"""
