"""The edits of Horovod's sources: it builds against today's frameworks, and three of its defects under Gloo are mended.

Each says what it expects to find, so that a source that isn't the known one is refused, not half changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import HvdtrainError
from hvdtrain.horovod.toolchain import Toolchain

# Part of the cache's key: raise it when an edit changes.
REVISION = 6


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
