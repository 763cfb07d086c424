"""Pages of many ranks from one process, for sizing a Prometheus; a program beside the training.

The contract: pages come from the catalogue and the registry that real ranks use.
"""
