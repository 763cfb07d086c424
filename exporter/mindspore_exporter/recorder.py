"""One JSON-lines file a rank, for post-mortems, the live page and replay.

The contract: a reader of the pipeline's decoded records in the worker; it hands lines to `fileio.FileThread` and never
waits for the file system.
"""
