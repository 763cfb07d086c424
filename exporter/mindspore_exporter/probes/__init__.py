"""Cells that measure inside the model, opt-in. One file a probe.

The contract of a probe: `attach(train_network)` before the first compile, on the training thread; its results stand in a
Parameter that the worker reads every N steps; it never synchronises the device in a step; `detach()` puts the network
back, so that no checkpoint carries the probe's Parameter.
"""
