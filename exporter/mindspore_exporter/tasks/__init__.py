"""What each kind of task (language model, detection, ...) adds to the generic metrics. One file a task.

The contract of a task: it names the parts of the losses and declares which `mindspore_model_*` families it feeds; it runs
in the worker, on decoded values.
"""
