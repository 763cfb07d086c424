"""Every row of the table recognises the real text it was made from. The texts are shortened, never reworded."""

# ruff: noqa: E501 - real texts keep their lines
from __future__ import annotations

from collections.abc import Callable

import pytest

from mindspore_exporter.metrics import END_REASONS
from mindspore_exporter.reasons import TABLE, Row, classify

RULE = "-" * 52
SITE = "/usr/lib/python3.11/site-packages"

# Provoked with mindspore 2.9.0 on CPU.
ALL_REDUCE_GAVE_UP = f"""
{RULE}
- Kernel error:
{RULE}
Launch kernel failed: Default/grad_reducer-DistributedGradReducer/AllReduce-op2

{RULE}
- The Function Call Stack: (For framework developers)
{RULE}
In file {SITE}/mindspore/nn/wrap/grad_reducer.py:385~386, 23~91/            new_grad = self.map_(ops.partial(reduce_opt, /

{RULE}
- C++ Call Stack: (For framework developers)
{RULE}
mindspore/ccsrc/backend/ms_backend/runtime/actors/base/kernel_actor.cc:995 OnMemoryAllocFinish
"""
MINT_ALL_REDUCE_GAVE_UP = f"""AllReduce failed.

{RULE}
- C++ Call Stack: (For framework developers)
{RULE}
mindspore/ops/kernel/cpu/pyboost/customize/dist_comm_all_reduce.cc:65 operator()
"""
PYNATIVE_OUT_OF_MEMORY = f"""Allocate memory failed

{RULE}
- C++ Call Stack: (For framework developers)
{RULE}
mindspore/ccsrc/backend/common/device_address_utils.cc:1300 MallocForOutputs
"""
BATCH_FAILED = f"""Exception thrown from dataset pipeline. Refer to 'Dataset Pipeline Error Message'.

{RULE}
- Dataset Pipeline Error Message:
{RULE}
[ERROR] Cannot batch tensors with different shapes in column 0. First element had shape <8> and this element had shape <9>

{RULE}
- C++ Call Stack: (For framework developers)
{RULE}
mindspore/ccsrc/minddata/dataset/engine/datasetops/batch_op.cc(303).
"""
SOURCE_FAILED = f"""Exception thrown from user defined Python function in dataset.

{RULE}
- Python Call Stack:
{RULE}
Traceback (most recent call last):
  File "{SITE}/mindspore/dataset/engine/datasets_user_defined.py", line 136, in _cpp_sampler_fn
    val = dataset[i]
  File "train.py", line 12, in __getitem__
    raise OSError("disk gone")
OSError: disk gone

{RULE}
- Dataset Pipeline Error Message:
{RULE}
[ERROR] Execute user Python code failed, check 'Python Call Stack' above.
"""
SOURCE_OUT_OF_MEMORY = SOURCE_FAILED.replace(
    "OSError: disk gone",
    "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 256. TiB for an array with shape (35184372088832,)"
    " and data type float64",
)

# mindspore 2.9.0, texts of the libraries and of Python sources, filled in.
DEVICE_OUT_OF_MEMORY = f"""
{RULE}
- Memory not enough:
{RULE}
Device(id:0) memory isn't enough and alloc failed, kernel name: Default/Adam-op12, alloc size: 100555779072B.
"""
ASCEND_OUT_OF_MEMORY = f"""
{RULE}
- Framework Error Message:
{RULE}
Out of Memory!!! Request memory size: 65498251264B, Memory Statistic:
"""
ASCEND_OCCUPIED = (
    "mindspore/ccsrc/plugin/device/ascend/hal/device/ascend_memory_adapter.cc:47 Initialize] Malloc device memory failed,"
    " free memory size is less than half of total memory size.Device 0 Device HBM total size:34359738368 Device HBM free"
    " size:1929908224 may be other processes occupying this card, check as: ps -ef|grep python"
)

# Public reports and documents; the source stands in the table's row.
GPU_OUT_OF_MEMORY = (
    "Out of memory. Memory malloc failed.\nLine of code : 621\nFile         :"
    " mindspore/ccsrc/minddata/dataset/engine/datasetops/device_queue_op.cc\n"
)
EL0004 = """[PID: 210907] 2026-04-09-21:56:40.384.694 Memory_Allocation_Failure(EL0004): Failed to allocate memory requested by GE module.
        Possible Cause: Available memory is insufficient.
        Solution: Close applications not in use.
        TraceBack (most recent call last):
        Call rtMalloc fail, purpose: page caching, type = 2, size:3221291008, device_id:0[FUNC:Alloc][FILE:device_allocator.cc][LINE:72]
"""
EI0007 = (
    "EI0007: Failed to allocate resource[stream] with info [device:0]. Reason: Memory resources are exhausted.\n"
    "        Possible Cause: Failed to allocate memory or the Notify register due to resource insufficiency."
)
EI0011 = """[PID: 2103452] 2025-11-03-20:18:46.447.213 Resource_Error_Insufficient_Device_Memory(EI0011): Failed to allocate [size: [0.25MB, 3MB], Affected by QP depth configuration.] bytes of NPU memory.
        Possible Cause: Allocation failure due to insufficient NPU memory.
"""
EI0002 = """EI0002: [PID: 2969] 2025-10-11-15:09:34.713.335 The wait execution of the Notify register times out. Reason: The Notify register has not received the Notify record from remote rank: [24]. base information: [streamID:[109], taskID[38], taskType[Notify Wait], tag[AllReduce_group_name_1654NHRAllReduceComm_device], AlgType(level 0-1-2):[ring-NHR-NHR].].
        Possible Cause: 1. An exception occurs during the execution on some NPUs in the cluster. As a result, collective communication operation failed.
"""
EI0006 = """Getting socket times out. Reason:
This node (server 192.168.200.100, device ID 1) detects that srcRank (server 192.168.200.100, device ID 1) fails to connect to dstRank (server 192.168.200.100, device ID 0). Continue to analyze the fault based on the logs of srcRank and dstRank.
"""
EI0013 = "[PID: 3448331] 2025-12-04-21:59:08.232.310 Execution Error ROCE CQE(EI0013): An error CQE occurred during operator execution. Local information: server 127.0.0.1, device ID 0, device IP 127.10.0.1."
P2P_TIMEOUT = f"""Preprocess failed before run graph 1.
{RULE}
- Ascend Error Message:
{RULE}
EI9999: Inner Error!
EI9999 connected p2p timeout, timeout:600 s.local logicDevid:0,remote physic id:7 The possible causes are as follows:1.the connection between this device and the target device is abnormal
"""
FFTSPLUS_TIMEOUT = """ACL stream synchronize failed.
EI9999: Inner Error!
EI9999: 2024-10-21-10:42:00.358.410  The error from device(chipId:3, dieId:0), serial number is 9, hccl fftsplus task timeout occurred during task execution, stream_id:5, sq_id:5, task_id:38827, stuck notify num:1, timeout:30min(default).
"""
EVENT_WAIT_TIMEOUT = """EE9999: Inner Error!
EE9999 The error from device(chipId:3, dieId:0), serial number is 1, event wait timeout occurred during task execution, stream_id:122, sq_id:122, task_id:790, event_id=73, timeout=1980.[FUNC:ProcessStarsWaitTimeoutErrorInfo][FILE:device_error_proc.cc][LINE:1314]
rtStreamSynchronizeWithTimeout execute failed, reason=[the model stream execute failed][FUNC:FuncErrorReason][FILE:error_message_manage.cc][LINE:50]
synchronize stream failed, runtime result = 507011[FUNC:ReportCallError][FILE:log_inner.cpp][LINE:161]
"""
FFTSPLUS_TIMEOUT_CODE = """EH9999: Inner Error!
        rtStreamSynchronizeWithTimeout execute failed, reason=[fftsplus timeout][FUNC:FuncErrorReason][FILE:error_message_manage.cc][LINE:53]
EH9999: [PID: 961] 2025-09-07-01:11:09.333.567 synchronize stream failed, runtime result = 507048[FUNC:ReportCallError][FILE:log_inner.cpp][LINE:161]
"""
AICORE_ERROR = """EZ9999: Inner Error!
EZ9999[PID: 110830] 2026-04-15-11:19:38.491.647 (EZ9999):  The error from device(chipId:0, dieId:0), serial number is 11, there is an aicore error exception, core id is 0, error code = 95, dump info: pc start: 0x100040800008
"""
AIVEC_ERROR = """EZ9999: Inner Error!
EZ9999: [PID: 838] 2025-09-04-09:50:11.954.378 The error from device(chipId:6, dieId:0), serial number is 8, there is an exception of aivec error, core id is 40, error code = 0, dump info: pc start: 0x124101423000
"""
GETNEXT_TIMEOUT = """E30008: AI CPU operator execution time out.
Possible Cause: 1. For the GetNext operator, its preprocessing duration may be too long.
TraceBack (most recent call last):
Aicpu kernel execute failed, device_id=0, stream_id=2, task_id=2, fault op_name=aicpu_getnext_IteratorGetNext[FUNC:GetError][FILE:stream.cc][LINE:1133]
rtStreamSynchronizeWithTimeout execute failed, reason=[aicpu timeout][FUNC:FuncErrorReason][FILE:error_message_manage.cc][LINE:49]
"""


def raised_in(file: str, error: BaseException) -> BaseException:
    """The error with a traceback that goes through `file`, as a library's own frames would."""
    names: dict[str, Callable[[BaseException], None]] = {}
    exec(compile("def fail(error):\n    raise error\n", file, "exec"), names)
    try:
        names["fail"](error)
    except BaseException as caught:
        return caught
    raise AssertionError("nothing was raised")


CASES = [
    ("out_of_memory", MemoryError("Unable to allocate 256. TiB for an array with shape (35184372088832,)")),
    ("out_of_memory", RuntimeError(DEVICE_OUT_OF_MEMORY)),
    ("out_of_memory", RuntimeError("Memory isn't enough and alloc failed, kernel name: Default/MatMul-op3")),
    ("out_of_memory", RuntimeError(ASCEND_OUT_OF_MEMORY)),
    ("out_of_memory", RuntimeError(ASCEND_OCCUPIED)),
    ("out_of_memory", RuntimeError(PYNATIVE_OUT_OF_MEMORY)),
    ("out_of_memory", RuntimeError("std::bad_alloc")),
    ("out_of_memory", RuntimeError(GPU_OUT_OF_MEMORY)),
    ("out_of_memory", RuntimeError(SOURCE_OUT_OF_MEMORY)),
    ("out_of_memory", RuntimeError(EL0004)),
    ("out_of_memory", RuntimeError(EI0007)),
    ("out_of_memory", RuntimeError(EI0011)),
    ("out_of_memory", RuntimeError("rtMalloc failed, runtime result = 207001[FUNC:ReportCallError]")),
    ("device_error", RuntimeError("UCEError error occurs when execute, error_code=507053")),
    ("device_error", RuntimeError("ForceStopError error occurs when execute")),
    ("device_error", RuntimeError("SuspectRemoteError error occurs when execute")),
    ("device_error", RuntimeError("Feature value detection strikes out!")),
    ("device_error", RuntimeError("ACL stream synchronize failed, error code:507015")),
    ("device_error", RuntimeError(AICORE_ERROR)),
    ("device_error", RuntimeError(AIVEC_ERROR)),
    ("device_error", RuntimeError("EI0012: [PID: 961] 2025-09-07-01:11:09.333.567 Execution_Error_SDMA")),
    ("device_error", RuntimeError("synchronize stream failed, runtime result = 507011[FUNC:ReportCallError]")),
    ("device_error", RuntimeError("EZ9999: Inner Error!\nEZ9999: [PID: 961] op execute failed")),
    ("collective_timeout", RuntimeError(EI0002)),
    ("collective_timeout", RuntimeError(EI0006)),
    ("collective_timeout", RuntimeError("Communication_Error_Get_Socket(EI0006)")),
    ("collective_timeout", RuntimeError(EI0013)),
    ("collective_timeout", RuntimeError(P2P_TIMEOUT)),
    ("collective_timeout", RuntimeError(FFTSPLUS_TIMEOUT)),
    ("collective_timeout", RuntimeError(EVENT_WAIT_TIMEOUT)),
    ("collective_timeout", RuntimeError(FFTSPLUS_TIMEOUT_CODE)),
    ("collective_timeout", RuntimeError("HCCEError error occurs when execute")),
    ("collective_timeout", RuntimeError("HcclAllReduce failed, ret:9")),
    ("collective_timeout", RuntimeError("HcclReduceScatterV failed, ret:9")),
    ("collective_timeout", RuntimeError(ALL_REDUCE_GAVE_UP)),
    ("collective_timeout", RuntimeError("Launch kernel failed: Default/AllReduce-op0")),
    ("collective_timeout", RuntimeError(MINT_ALL_REDUCE_GAVE_UP)),
    ("collective_timeout", RuntimeError("Topology build timed out.")),
    ("data_error", RuntimeError(GETNEXT_TIMEOUT)),
    ("data_error", RuntimeError(BATCH_FAILED)),
    ("data_error", RuntimeError(SOURCE_FAILED)),
    ("data_error", ValueError("There is no valid data in dataset, please check dataset file firstly.")),
    (
        "data_error",
        RuntimeError("Getnext gets peek data time out, that most likely caused by data processing being too slow"),
    ),
    (
        "data_error",
        raised_in(
            f"{SITE}/mindspore/dataset/engine/validators.py",
            ValueError("The file /data/train.mindrecord does not exist or permission denied!"),
        ),
    ),
    (
        "data_error",
        raised_in(f"{SITE}/mindspore/mindrecord/filereader.py", RuntimeError("The input: /data/a.db is not exists.")),
    ),
    (
        "non_finite",
        ValueError("In epoch: 1 step: 6, loss is NAN or INF, training process cannot continue, terminating training."),
    ),
    ("non_finite", ValueError("There is nan in loss with value nan, terminate training.")),
    ("non_finite", ValueError("There is inf in global_norm with value [inf], terminate training.")),
    ("non_finite", FloatingPointError("divide by zero encountered in divide")),
    (
        "checkpoint_error",
        IsADirectoryError(
            "For 'save_checkpoint', the parameter `ckpt_file_name`: /tmp is a directory, it must be a file name."
        ),
    ),
    (
        "checkpoint_error",
        ValueError(
            "For 'load_checkpoint', the checkpoint file: /tmp/none.ckpt does not exist, please check whether the"
            " 'ckpt_file_name' is correct."
        ),
    ),
    (
        "checkpoint_error",
        raised_in(f"{SITE}/mindspore/train/serialization.py", OSError(28, "No space left on device")),
    ),
    (
        "checkpoint_error",
        raised_in(f"{SITE}/mindspore/train/callback/_checkpoint.py", PermissionError(13, "Permission denied")),
    ),
    (
        "checkpoint_error",
        raised_in(f"{SITE}/mindformers/checkpoint/checkpoint.py", OSError(116, "Stale file handle")),
    ),
]


def first_row(error: BaseException) -> Row | None:
    return next((row for row in TABLE if row.recognises(error, f"{type(error).__name__}: {error}")), None)


@pytest.mark.parametrize(("reason", "error"), CASES, ids=lambda value: str(value)[:40].replace("\n", " "))
def test_the_real_text_has_its_reason(reason: str, error: BaseException) -> None:
    assert classify(type(error), error) == reason


def test_every_row_is_reached_by_a_real_text_and_has_a_source() -> None:
    reached = {id(first_row(error)) for _, error in CASES}
    assert [row for row in TABLE if id(row) not in reached] == []
    assert all(row.source for row in TABLE)


def test_every_reason_of_the_table_is_one_of_the_catalogue() -> None:
    assert {row.reason for row in TABLE} <= set(END_REASONS)


def test_a_training_that_returns_is_finished_or_was_asked_to_stop() -> None:
    assert classify(None, None) == "finished"
    assert classify(None, None, stop_requested=True) == "stop_requested"
    assert classify(None, None, nonfinite_seen=True) == "finished"


def test_ctrl_c_is_a_keyboard_interrupt_also_when_the_program_turns_it_into_an_exit() -> None:
    assert classify(KeyboardInterrupt, KeyboardInterrupt()) == "keyboard_interrupt"
    assert classify(KeyboardInterrupt, None) == "keyboard_interrupt"
    error = SystemExit(0)
    error.__context__ = KeyboardInterrupt()
    assert classify(SystemExit, error) == "keyboard_interrupt"


def test_ctrl_c_wins_over_the_error_that_was_being_handled() -> None:
    error = KeyboardInterrupt()
    error.__context__ = RuntimeError(BATCH_FAILED)
    assert classify(KeyboardInterrupt, error) == "keyboard_interrupt"


@pytest.mark.parametrize("code", [None, 0])
def test_an_exit_with_success_is_a_stop_that_the_program_asked_for(code: int | None) -> None:
    assert classify(SystemExit, SystemExit(code)) == "stop_requested"


@pytest.mark.parametrize("code", [1, 137, "no licence left"])
def test_an_exit_with_failure_is_an_exception(code: int | str) -> None:
    assert classify(SystemExit, SystemExit(code)) == "exception"


def test_an_exit_with_failure_has_the_reason_of_the_error_that_led_to_it() -> None:
    error = SystemExit(1)
    error.__context__ = RuntimeError(DEVICE_OUT_OF_MEMORY)
    assert classify(SystemExit, error) == "out_of_memory"


def test_the_cause_of_a_wrapped_error_is_the_reason() -> None:
    error = RuntimeError("training failed")
    error.__cause__ = RuntimeError(EI0002)
    assert classify(RuntimeError, error) == "collective_timeout"


def test_the_innermost_known_error_is_the_reason() -> None:
    error = raised_in(f"{SITE}/mindspore/train/serialization.py", OSError(28, "No space left on device"))
    error.__context__ = RuntimeError(DEVICE_OUT_OF_MEMORY)
    assert classify(type(error), error) == "out_of_memory"


def test_a_suppressed_context_is_not_the_reason() -> None:
    error = RuntimeError("unknown")
    error.__context__ = RuntimeError(EI0002)
    error.__suppress_context__ = True
    assert classify(RuntimeError, error) == "exception"


def test_a_device_fault_in_a_collective_is_a_device_error() -> None:
    error = RuntimeError(f"Launch kernel failed: Default/AllReduce-op2\n{AICORE_ERROR}")
    assert classify(RuntimeError, error) == "device_error"


def test_an_unknown_error_is_an_exception() -> None:
    assert classify(ValueError, ValueError("of the user")) == "exception"
    assert classify(ValueError, None) == "exception"


def test_a_number_that_nothing_calls_a_code_is_not_one() -> None:
    assert classify(ValueError, ValueError("shape (15070151, 20700)")) == "exception"
    assert classify(ValueError, ValueError("expected 507904 tokens, 507015 came")) == "exception"


def test_an_unknown_error_after_a_nan_step_is_non_finite() -> None:
    error = ValueError("my own check: stop")
    assert classify(ValueError, error, nonfinite_seen=True) == "non_finite"


def test_a_known_error_after_a_nan_step_keeps_its_reason() -> None:
    assert classify(RuntimeError, RuntimeError(EI0002), nonfinite_seen=True) == "collective_timeout"


def test_a_broken_str_of_the_error_does_not_matter() -> None:
    class BrokenError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("broken")

    assert classify(BrokenError, BrokenError()) == "exception"


def test_a_chain_that_is_a_circle_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert classify(ValueError, first) == "exception"


def test_a_message_of_megabytes_is_searched_at_its_beginning_only() -> None:
    stack = "In file net.py:1, 2~3/\n" * 500_000
    assert classify(RuntimeError, RuntimeError(DEVICE_OUT_OF_MEMORY + stack)) == "out_of_memory"
    assert classify(RuntimeError, RuntimeError(stack + DEVICE_OUT_OF_MEMORY)) == "exception"
