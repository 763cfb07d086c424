"""Acting on what is seen: off by default.

The contract: the worker publishes `act at global step S`; the hook compares one integer and nothing else; each action is
counted in `mindspore_guard_actions_total`.
"""
