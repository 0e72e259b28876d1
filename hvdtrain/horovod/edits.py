"""The edits of Horovod's sources: so it builds against today's frameworks, recovers under Gloo, and wastes less time.

Each says what it expects to find, so that a source that isn't the known one is refused, not half changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import HvdtrainError
from hvdtrain.horovod.toolchain import Toolchain

# Part of the cache's key: raise it when an edit changes.
REVISION = 7


@dataclass(frozen=True)
class Edit:
    """One replacement in one file.

    Attributes:
        file: relative to the sources.
        old: text that must be there exactly once.
        new: what replaces it, from the toolchain.
        why: for the reader of the log.
        applies: whether the toolchain needs it.
    """

    file: str
    old: str
    new: Callable[[Toolchain], str]
    why: str
    applies: Callable[[Toolchain], bool]


def _needs_newer_standard(than: int) -> Callable[[Toolchain], bool]:
    return lambda toolchain: toolchain.cxx_standard > than


def _lacks_xla_header(toolchain: Toolchain) -> bool:
    return any(
        framework.name == "tensorflow" and not (framework.include / "highwayhash" / "arch_specific.h").is_file()
        for framework in toolchain.frameworks
    )


def _standard(toolchain: Toolchain) -> str:
    return f"set(CMAKE_CXX_STANDARD {toolchain.cxx_standard})"


# What was opened so far is closed, as other ranks may wait for this one on it.
_GUARDED_THREAD = """\
    horovod_global.initialization_failed = false;
    horovod_global.background_thread = std::thread([] {
      try {
        BackgroundThreadLoop(horovod_global);
      } catch (const std::exception& ex) {
        LOG(ERROR) << "Horovod could not be initialized: " << ex.what();
#if HAVE_GLOO
        horovod_global.process_set_table.Get(0).gloo_context.Finalize();
        global_gloo_context.Finalize();
#endif
        horovod_global.initialization_failed = true;
      }
    });
"""


# Both of an exchange's ends: a rank that sends first has its word that it can receive queued behind its data, and then
# the other waits for all of that before it sends, so that a link carries one direction after the other.
_SEND_FIRST_TO_ALL = """\
    in->send(
        sendRank, slot, inOffsetPerRank[sendRank], inLengthPerRank[sendRank]);
    out->recv(
        recvRank, slot, outOffsetPerRank[recvRank], outLengthPerRank[recvRank]);
  }
"""
_RECEIVE_FIRST_FROM_ALL = """\
    out->recv(
        recvRank, slot, outOffsetPerRank[recvRank], outLengthPerRank[recvRank]);
  }
  for (int i = 1; i < worldSize; i++) {
    int sendRank = (myRank + i) % worldSize;
    in->send(
        sendRank, slot, inOffsetPerRank[sendRank], inLengthPerRank[sendRank]);
  }
"""
_SEND = "out->send(sendRank, slot, byteOffsets[sendIndex], byteCounts[sendIndex]);\n"
_RECEIVE = "out->recv(recvRank, slot, byteOffsets[recvIndex], byteCounts[recvIndex]);\n"
_WAITS = """\
    out->waitSend(opts.timeout);
    out->waitRecv(opts.timeout);
"""
_WAIT_FOR_HANDLE = """\

void HandleManager::Wait(int handle) {
  std::unique_lock<std::mutex> guard(mutex_);
  done_.wait(guard, [this, handle] {
    auto found = results_.find(handle);
    return found == results_.end() || found->second != nullptr;
  });
}

bool HandleManager::PollHandle(int handle) {
"""
_SPINNING_WAIT = """\
  while (true) {
    if (handle_manager.PollHandle(handle)) break;
    {
      py::gil_scoped_release release_python_gil;
      std::this_thread::yield();
    }
  }
"""
_SLEEPING_WAIT = """\
  {
    py::gil_scoped_release release_python_gil;
    handle_manager.Wait(handle);
  }
"""
_SPUN = "a thread that waited for a collective turned round and round, and kept Horovod's own from the core"
_HALF_DUPLEX = "ranks that send before they are ready to receive use a link in one direction at a time, now and then"


def _known_parts(*, mpi: bool) -> str:
    return f"""\
    # hvdtrain: known since the build.
    built_with = {{'built with Gloo': True, 'built with MPI': {mpi}}}
    if fn_desc in built_with:
        return built_with[fn_desc]

    # 'fork' is required because horovodrun is a frozen executable
"""


EDITS = (
    Edit(
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        _standard,
        "the frameworks' headers refuse C++14 (horovod issue 3996); -std= in CXXFLAGS is stripped by this file",
        _needs_newer_standard(14),
    ),
    Edit(
        "horovod/torch/CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        _standard,
        "the same, for PyTorch's part",
        _needs_newer_standard(14),
    ),
    Edit(
        "horovod/torch/CMakeLists.txt",
        "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        lambda _: "import sysconfig; print(sysconfig.get_path('include'))",
        "Python 3.12 has no distutils; without this Python.h is only found where setuptools stands in for it",
        lambda _: True,
    ),
    Edit(
        "horovod/tensorflow/CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 17)",
        _standard,
        "the same, for TensorFlow's part",
        _needs_newer_standard(17),
    ),
    Edit(
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        lambda _: "",
        "this file needs highwayhash/arch_specific.h, which TensorFlow ships no more; it holds only the XLA path",
        _lacks_xla_header,
    ),
    Edit(
        "cmake/Modules/FindNCCL.cmake",
        'NAMES "nccl"',
        lambda _: 'NAMES "nccl" "libnccl.so.2"',
        "NCCL's pip package, which PyTorch brings along, has its library under this name only",
        lambda toolchain: toolchain.nccl is not None,
    ),
    Edit(
        "horovod/common/gloo/gloo_controller.cc",
        "  global_ranks_.reserve(size_);",
        lambda _: "  global_ranks_.resize(size_);",
        "the list of ranks stays empty otherwise, and the stall check and its shutdown never act under Gloo",
        lambda _: True,
    ),
    Edit(
        "horovod/common/gloo/gloo_context.cc",
        "void GlooContext::Finalize() {\n  if (!enabled_) {\n    return;\n  }\n",
        lambda _: "void GlooContext::Finalize() {\n",
        "a process set's context is never enabled, so its connections stayed open after a failure, and the other "
        "ranks of an elastic job waited for Gloo's timeout (30 s) to see that one had left",
        lambda _: True,
    ),
    Edit(
        "horovod/common/operations.cc",
        "    horovod_global.background_thread =\n"
        "        std::thread(BackgroundThreadLoop, std::ref(horovod_global));\n",
        lambda _: _GUARDED_THREAD,
        "the process was aborted where the ranks don't find each other; now hvd.init() raises, and can be tried again",
        lambda _: True,
    ),
    Edit(
        "horovod/torch/handle_manager.h",
        "  bool PollHandle(int handle);\n",
        lambda _: "  bool PollHandle(int handle);\n  void Wait(int handle);\n",
        _SPUN,
        lambda _: True,
    ),
    Edit(
        "horovod/torch/handle_manager.h",
        "  std::mutex mutex_;\n",
        # Never destroyed: at a process's end that would wait for a thread that still waits for a collective.
        lambda _: "  std::mutex mutex_;\n  std::condition_variable& done_ = *new std::condition_variable;\n",
        _SPUN,
        lambda _: True,
    ),
    Edit(
        "horovod/torch/handle_manager.h",
        "#include <atomic>\n",
        lambda _: "#include <atomic>\n#include <condition_variable>\n",
        _SPUN,
        lambda _: True,
    ),
    Edit(
        "horovod/torch/handle_manager.cc",
        "  results_[handle] = std::make_shared<Status>(status);\n",
        lambda _: "  results_[handle] = std::make_shared<Status>(status);\n  done_.notify_all();\n",
        _SPUN,
        lambda _: True,
    ),
    Edit(
        "horovod/torch/handle_manager.cc",
        "  results_.clear();\n",
        lambda _: "  results_.clear();\n  done_.notify_all();\n",
        _SPUN,
        lambda _: True,
    ),
    Edit(
        "horovod/torch/handle_manager.cc",
        "\nbool HandleManager::PollHandle(int handle) {\n",
        lambda _: _WAIT_FOR_HANDLE,
        _SPUN,
        lambda _: True,
    ),
    Edit(
        "horovod/torch/mpi_ops_v2.cc",
        _SPINNING_WAIT,
        lambda _: _SLEEPING_WAIT,
        _SPUN,
        lambda _: True,
    ),
    Edit(
        "third_party/gloo/gloo/alltoallv.cc",
        _SEND_FIRST_TO_ALL,
        lambda _: _RECEIVE_FIRST_FROM_ALL,
        _HALF_DUPLEX,
        lambda _: True,
    ),
    Edit(
        "third_party/gloo/gloo/allgatherv.cc",
        f"      {_SEND}      {_RECEIVE}",
        lambda _: f"      {_RECEIVE}      {_SEND}",
        _HALF_DUPLEX,
        lambda _: True,
    ),
    Edit(
        "third_party/gloo/gloo/allgatherv.cc",
        f"{_WAITS}    {_SEND}    {_RECEIVE}",
        lambda _: f"{_WAITS}    {_RECEIVE}    {_SEND}",
        _HALF_DUPLEX,
        lambda _: True,
    ),
    Edit(
        "horovod/common/util.py",
        "    # 'fork' is required because horovodrun is a frozen executable\n",
        lambda toolchain: _known_parts(mpi=toolchain.mpi is not None),
        "horovodrun imported TensorFlow at each start, for seconds, to see whether Gloo and MPI are built in",
        lambda _: True,
    ),
    Edit(
        "horovod/runner/js_run.py",
        "from distutils.spawn import find_executable",
        lambda _: "from shutil import which as find_executable",
        "Python 3.12 has no distutils, and horovodrun imports this file always",
        lambda _: True,
    ),
)


def apply_edits(sources: Path, toolchain: Toolchain) -> list[Edit]:
    """Change the sources as the toolchain needs it. Returns the edits that were made.

    Raises:
        HvdtrainError: the text that an edit replaces isn't there; nothing was changed.
    """
    wanted = [edit for edit in EDITS if edit.applies(toolchain)]
    texts = {edit.file: _read(sources, edit.file) for edit in wanted}
    for edit in wanted:
        if texts[edit.file].count(edit.old) != 1:
            raise HvdtrainError(
                f"these aren't the sources of Horovod that the edits are made for: '{edit.old.strip()}' is missing",
                where=str(sources / edit.file),
                fix="use Horovod 0.28.1's own source package",
            )
        texts[edit.file] = texts[edit.file].replace(edit.old, edit.new(toolchain))
    for file, text in texts.items():
        (sources / file).write_text(text)
    return wanted


def _read(sources: Path, file: str) -> str:
    try:
        return (sources / file).read_text()
    except OSError:
        return ""
