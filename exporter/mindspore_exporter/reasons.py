"""Why a training ended: a table of exception class, message and place.

The table is data: a row names the reason, what it recognises and where that text is documented or was seen. Rows are
tried in order. Causes stand before what they cause: a collective that cannot allocate is out of memory; a device that
reports a hardware fault has one, although the task that failed was a collective.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

_LONGEST_MESSAGE = 65_536
"""Characters of a message that are searched: a graph's call stack may follow the error for megabytes."""
_DEEPEST_CHAIN = 16
_CANN = "https://www.hiascend.com/document/detail/zh/canncommercial/900/maintenref/troubleshooting/"
_HCCL = "https://www.hiascend.com/document/detail/en/CANNCommunityEdition/900/API/hcclug/"
_ACL = "CANN, include/external/acl/error_codes/rt_error_codes.h"
_MINDSPORE = "mindspore 2.9.0, "


@dataclass(frozen=True)
class Row:
    """One line of the table: the exception's class, or a pattern in its message, or the file it was raised in.

    `place` is the end of a source file's path (or a folder in it) on the exception's traceback. `source` says where the
    text comes from: a file of MindSpore or MindSpore Transformers, a public document, or how it was provoked.
    """

    reason: str
    source: str
    kinds: tuple[type[BaseException], ...] = ()
    message: re.Pattern[str] | None = None
    place: str = ""

    def recognises(self, exception: BaseException, message: str) -> bool:
        """Whether the row speaks of this exception; `message` is its text."""
        if isinstance(exception, self.kinds):
            return True
        if self.message is not None:
            return self.message.search(message) is not None
        return bool(self.place) and any(self.place in file for file in _files(exception.__traceback__))


def _kind(reason: str, source: str, *kinds: type[BaseException]) -> Row:
    return Row(reason, source, kinds=kinds)


def _message(reason: str, source: str, *patterns: str) -> Row:
    return Row(reason, source, message=re.compile("|".join(f"(?:{pattern})" for pattern in patterns)))


def _place(reason: str, source: str, place: str) -> Row:
    return Row(reason, source, place=place)


_CODE = r"(?:code|number|flag|result|ret|failed)(?: is)?[\s:=,(\[]*"
"""What stands before a code of the CANN runtime: a bare number may be a shape."""
_COLLECTIVES = (
    "All(?:Reduce|Gather|ToAll)|AlltoAll|ReduceScatter|Reduce|Broadcast|Scatter|Gather|Barrier|Send|Receive|Recv"
)

TABLE = (
    _kind("out_of_memory", "Python and numpy: an array that the host cannot hold", MemoryError),
    _message(
        "out_of_memory",
        _MINDSPORE + "libmindspore_ms_backend.so, libmindspore_pynative_utils.so",
        r"[Mm]emory isn't enough and alloc failed",
    ),
    _message(
        "out_of_memory",
        _MINDSPORE + "plugin/ascend/libmindspore_ascend_res_manager.so",
        r"Out of Memory!!! Request memory size",
        r"Malloc device memory failed",
    ),
    _message(
        "out_of_memory",
        _MINDSPORE + "provoked on CPU: PyNative and graph mode, a tensor larger than the host",
        r"Allocate (?:\w+ )*memory failed",
        r"^RuntimeError: std::bad_alloc",
    ),
    _message(
        "out_of_memory", "https://github.com/mindspore-ai/mindspore/issues/172", r"Out of memory\. Memory malloc failed"
    ),
    _message(
        "out_of_memory",
        "a dataset worker's MemoryError, in the text of the dataset's error",
        r"Unable to allocate .* for an array with shape",
    ),
    _message(
        "out_of_memory",
        _CANN + "atlaserrorcode_15_0267.html (EL0004), atlaserrorcode_15_0247.html (EI0007),"
        " atlaserrorcode_15_0324.html (EI0011), atlaserrorcode_15_0462.html (EL0019)",
        r"\bEL0004\b",
        r"\bEL0019\b",
        r"\bEI0011\b",
        r"Failed to allocate resource.*Memory resources are exhausted",
    ),
    _message(
        "out_of_memory", _ACL + ": 207001 memory allocation, 207018 device memory exhausted", rf"{_CODE}2070(?:01|18)\b"
    ),
    _message(
        "device_error",
        _MINDSPORE + "train/model.py and libmindspore_tools.so: fault-tolerant training",
        r"UCEError",
        r"ForceStopError",
        r"SuspectRemoteError",
    ),
    _message(
        "device_error",
        _MINDSPORE + "libmindspore_tools.so: silent data corruption found by feature values",
        r"Feature value detection strikes out",
    ),
    _message(
        "device_error",
        _ACL + ": aicore, aicpu and vector core exceptions, lost heartbeat, memory errors",
        rf"{_CODE}507(?:010|014|015|016|017|018|034|035|042|043|044|045|053|054|055|057)\b",
    ),
    _message(
        "device_error",
        "https://github.com/vllm-project/vllm-ascend/issues/2763, .../hw-native-sys/PTOAS/pull/482",
        r"ai(?:core|vec) error exception",
        r"exception of (?:fftsplus )?ai(?:core|vec) error",
    ),
    _message("device_error", _CANN + "EI0012 Execution_Error_SDMA", r"\bEI0012\b"),
    _message("collective_timeout", _CANN + "atlaserrorcode_15_0242.html", r"\bEI0002\b", r"Notify register times out"),
    _message(
        "collective_timeout",
        _HCCL + "hcclug_000050.html",
        r"\bEI0006\b",
        r"Getting socket times out",
        r"wait socket establish timeout",
    ),
    _message(
        "collective_timeout",
        _CANN + "atlaserrorcode_15_0240.html (EI0009, EI0010), atlaserrorcode_15_0349.html"
        " (EI0013); " + _HCCL + "hcclug_000037.html (EI0015)",
        r"\bEI00(?:09|10|13|15)\b",
    ),
    _message(
        "collective_timeout",
        "https://www.hiascend.com/forum/thread-0215158816345510019-1-1.html",
        r"connected p2p timeout",
    ),
    _message("collective_timeout", "https://github.com/Ascend/pytorch/issues/54", r"hccl fftsplus task timeout"),
    _message(
        "collective_timeout",
        "https://discuss.mindspore.cn/t/topic/1156: a rank that waits longer than HCCL_EXEC_TIMEOUT",
        r"event wait timeout occurred during task execution",
    ),
    _message(
        "collective_timeout",
        _ACL + ": 507048 ffts+ timeout, 507056 link error, 507904 hccl retry failed",
        rf"{_CODE}507(?:048|056|904)\b",
    ),
    _message(
        "collective_timeout",
        _MINDSPORE + "train/model.py: reported to fault-tolerant training as HCCL failure",
        r"HCCEError",
    ),
    _message(
        "collective_timeout",
        _MINDSPORE + "plugin/libmindspore_ops_ascend.so",
        rf"Hccl(?:{_COLLECTIVES})\w* failed, ret:",
    ),
    _message(
        "collective_timeout",
        _MINDSPORE + "provoked on two CPU ranks, graph mode: the all-reduce gives up after 30 s",
        rf"Launch kernel failed: \S*\b(?:{_COLLECTIVES})\w*-op\d+",
    ),
    _message(
        "collective_timeout",
        _MINDSPORE + "provoked on two CPU ranks, mint.distributed",
        rf"^RuntimeError: (?:{_COLLECTIVES}) failed\.",
    ),
    _message(
        "collective_timeout",
        _MINDSPORE + "libmindspore_cpu.so, libmindspore_cluster.so: building the cluster",
        r"meta server node due to timeout",
        r"AllGather host's hash name due to timeout",
        r"Topology build timed out",
    ),
    _message(
        "data_error", _CANN + "troubleshooting_0145.html: on a device GetNext waits for the dataset", r"aicpu_getnext"
    ),
    _message("device_error", _ACL + ": 507xxx, device and driver", rf"{_CODE}507\d{{3}}\b"),
    _message(
        "device_error",
        "https://github.com/vllm-project/vllm-ascend/issues/2763: CANN's inner errors",
        r"\bE[A-Z]9999\b",
    ),
    _message(
        "data_error",
        _MINDSPORE + "provoked: a dataset's source, map function, batch",
        r"Exception thrown from (?:dataset pipeline|user defined Python function in dataset)",
        r"Dataset Pipeline Error Message",
    ),
    _message("data_error", _MINDSPORE + "provoked: an empty dataset", r"There is no valid data in dataset"),
    _message(
        "data_error",
        _MINDSPORE + "libmindspore_hardware_abstract.so",
        r"Getnext gets peek data (?:time out|from data queue failed)",
    ),
    _place("data_error", _MINDSPORE + "dataset/: raised while a dataset is built or iterated", "/mindspore/dataset/"),
    _place("data_error", _MINDSPORE + "mindrecord/", "/mindspore/mindrecord/"),
    _message("non_finite", _MINDSPORE + "train/callback/_loss_monitor.py", r"loss is NAN or INF"),
    _message(
        "non_finite",
        "mindformers 1.9.0, core/callback/callback.py: MFLossMonitor",
        r"There is (?:nan|inf) in \w+ with value",
    ),
    _kind("non_finite", "Python and numpy with numpy.errstate(all='raise')", FloatingPointError),
    _message(
        "checkpoint_error",
        _MINDSPORE + "train/serialization.py",
        r"For '(?:save_checkpoint|load_checkpoint|load_param_into_net)'",
        r"Failed to read the checkpoint file",
        r"The loaded parameter dict is empty",
    ),
    _place(
        "checkpoint_error",
        _MINDSPORE + "train/serialization.py: the system's error on writing or reading",
        "/mindspore/train/serialization.py",
    ),
    _place(
        "checkpoint_error", _MINDSPORE + "train/callback/_checkpoint.py", "/mindspore/train/callback/_checkpoint.py"
    ),
    _place("checkpoint_error", "mindformers 1.9.0, checkpoint/", "/mindformers/checkpoint/"),
)
"""Tried from the top; the first row that recognises the exception names the reason."""


def classify(
    exception_type: type[BaseException] | None,
    exception: BaseException | None,
    *,
    stop_requested: bool = False,
    nonfinite_seen: bool = False,
) -> str:
    """One of `metrics.END_REASONS` for what `__exit__` was given; never raises.

    No exception is `finished`, or `stop_requested` when the training was asked to stop. `sys.exit(0)` inside a training
    is the program's own decision and a success for whoever started it: `stop_requested`. Ctrl-C wins over what was
    being handled. Otherwise the innermost exception of the chain that the table knows is the reason: saving a last
    checkpoint that fails after a device ran out of memory is out of memory. `nonfinite_seen` (the last step's loss or
    gradient norm was NaN or infinite) makes an exception that the table does not know `non_finite`.
    """
    if exception_type is None:
        return "stop_requested" if stop_requested else "finished"
    chain = list(_chain(exception))
    if issubclass(exception_type, KeyboardInterrupt) or any(isinstance(link, KeyboardInterrupt) for link in chain):
        return "keyboard_interrupt"
    if isinstance(exception, SystemExit) and exception.code in (None, 0):
        return "stop_requested"
    for link in reversed(chain):
        message = _text(link)
        for row in TABLE:
            if row.recognises(link, message):
                return row.reason
    return "non_finite" if nonfinite_seen else "exception"


def _chain(exception: BaseException | None) -> Iterator[BaseException]:
    """The exception and what it was raised from or while handling, outermost first."""
    seen: set[int] = set()
    while exception is not None and id(exception) not in seen and len(seen) < _DEEPEST_CHAIN:
        seen.add(id(exception))
        yield exception
        suppressed = exception.__suppress_context__
        exception = exception.__cause__ or (None if suppressed else exception.__context__)


def _text(exception: BaseException) -> str:
    try:
        return f"{type(exception).__name__}: {exception}"[:_LONGEST_MESSAGE]
    except Exception:
        # A broken __str__ is the user's and must not hide the end.
        return type(exception).__name__


def _files(trace: TracebackType | None) -> Iterator[str]:
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename.replace("\\", "/")
        trace = trace.tb_next
