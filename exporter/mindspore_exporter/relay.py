"""Alertmanager's webhook in, chat robots out; a program beside the training, never imported by it.

The contract: families `mindspore_relay_*` of the catalogue, secrets by file, retries left to Alertmanager by status code.
"""
