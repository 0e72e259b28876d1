"""The program and its Python: what is missing, what doesn't fit, and what Horovod says of how it is used."""

from __future__ import annotations

from hvdtrain.diagnosis.models import Rule

# How Horovod's own build of a part is named in a path.
_EXTENSION = r"(?P<path>\S*horovod/(?P<part>torch|tensorflow|mxnet)/mpi_lib\S*\.so)"
# TensorFlow and NCCL look for libraries that they can do without, and say so of those that aren't there.
_NOT_OPTIONAL = r"^(?![^\n]*(?:dlerror|Could not load dynamic library|NCCL INFO|Plugin load))(?:[^\n]*[\s:])?"

RULES = (
    Rule(
        "horovod-part-missing",
        "has not been built",
        r"Extension horovod\.(?P<part>\w+) has not been built",
        "Horovod was built without its part for {part} in the Python that {who} runs",
        "hvdtrain horovod build --with {part} (in that environment, on every host)",
        "setup",
    ),
    Rule(
        "horovod-other-framework",
        "undefined symbol",
        _EXTENSION + r": undefined symbol: (?P<symbol>\w+)",
        "Horovod was compiled against another version of {part} than the one that is installed "
        "(symbol {symbol} is missing)",
        "hvdtrain horovod build --rebuild --with {part}; `hvdtrain horovod check` shows both versions",
        "setup",
    ),
    Rule(
        "undefined-symbol",
        "undefined symbol",
        r"(?P<library>[^\s:]+\.so[\w.]*): undefined symbol: (?P<symbol>\w+)",
        "the library {library} was compiled against another version of what it uses (symbol {symbol} is missing)",
        "install the versions that belong together again; also look for a second copy in ~/.local (PYTHONNOUSERSITE=1) "
        "and in LD_LIBRARY_PATH",
        "setup",
    ),
    Rule(
        "old-c-library",
        ("GLIBC", "CXXABI_"),
        r"(?P<library>\S+): version `(?P<version>(?:GLIBC|GLIBCXX|CXXABI)_[\w.]+)' not found(?: \(required by "
        r"(?P<by>[^)]+)\))?",
        "{library} is older than what {by} was built for ({version} is missing on this host)",
        "run the same operating system or container image on every host, or build that package on the oldest of them; "
        "for GLIBCXX, put the environment's newer libstdc++ first on LD_LIBRARY_PATH",
        "setup",
    ),
    Rule(
        "cuda-library-missing",
        "cannot open shared object file",
        _NOT_OPTIONAL + r"(?P<library>lib(?:cudart|cublas|cublasLt|cudnn\w*|cufft|curand|cusolver|cusparse|nccl|cuda|"
        r"nvrtc)\.so[\w.]*): cannot open shared object file",
        "the CUDA library {library} isn't found by {who}",
        "install the CUDA version that the framework was built for on that host, or add its folder to LD_LIBRARY_PATH "
        "with env.set in the job",
        "setup",
    ),
    Rule(
        "mpi-library-missing",
        "cannot open shared object file",
        r"(?P<library>lib(?:mpi|mpi_cxx|open-rte|open-pal|pmix)\.so[\w.]*): cannot open shared object file",
        "the MPI library {library} isn't found by {who}",
        "install the same Open MPI on every host (Debian: openmpi-bin libopenmpi3), or add its lib folder to "
        "LD_LIBRARY_PATH",
        "setup",
    ),
    Rule(
        "library-missing",
        "cannot open shared object file",
        _NOT_OPTIONAL + r"(?P<library>[\w./+-]+\.so[\w.]*): cannot open shared object file",
        "the library {library} isn't found by {who}",
        "install it on that host, or add its folder to LD_LIBRARY_PATH with env.set in the job",
        "setup",
    ),
    Rule(
        "shadowed-module",
        "partially initialized module",
        r"partially initialized module '(?P<module>[\w.]+)'",
        "a file named {module}.py beside the script, or an import cycle, hides the real module '{module}'",
        "rename the file {module}.py of your own (the traceback shows its path)",
    ),
    Rule(
        "horovod-missing",
        "No module named 'horovod",
        r"ModuleNotFoundError: No module named '(?P<module>horovod[\w.]*)'",
        "the Python that {who} runs has no Horovod: it may be another Python than the one where Horovod is installed",
        "give the interpreter by its absolute path, or hvdtrain horovod build in that environment, on every host",
        "setup",
    ),
    Rule(
        "module-missing",
        "No module named",
        r"(?:ModuleNotFoundError|ImportError): No module named '?(?P<module>[\w.]+)'?",
        "the Python that {who} runs has no module '{module}'",
        "python -m pip install the package of '{module}' on every host, or give the right interpreter by its absolute "
        "path",
        "setup",
    ),
    Rule(
        "module-missing-run",
        "No module named",
        r"^(?P<python>\S*python[\d.]*): No module named (?P<module>[\w.]+)$",
        "{python} has no module '{module}'",
        "install it there, or give the right interpreter by its absolute path",
        "setup",
    ),
    Rule(
        "script-missing",
        "can't open file",
        r"(?P<python>\S*python[\d.]*): can't open file '(?P<script>[^']+)': \[Errno (?P<number>\d+)\] (?P<why>.*)",
        "the script {script} can't be opened by {who}: {why}",
        "give its absolute path, and make sure that the path exists on every host (a shared folder, or a copy)",
        "setup",
    ),
    Rule(
        "numpy-binary",
        (
            "numpy.dtype size changed",
            "compiled using NumPy 1.x",
            "_ARRAY_API not found",
            "numpy.core.multiarray failed",
        ),
        r"numpy\.dtype size changed|compiled using NumPy 1\.x|_ARRAY_API not found|numpy\.core\.multiarray failed to "
        r"import",
        "a compiled package was built against another NumPy than the one that is installed",
        "pip install --force-reinstall --no-cache-dir that package (the traceback names it), or pip install 'numpy<2' "
        "if it has no newer version",
        "setup",
    ),
    Rule(
        "protobuf",
        (
            "Descriptors cannot be created directly",
            "Descriptors cannot not be created",
            "GetPrototype",
            "runtime_version",
        ),
        r"Descriptors cannot (?:not )?be created directly|has no attribute 'GetPrototype'|"
        r"cannot import name 'runtime_version' from 'google\.protobuf'",
        "the installed protobuf doesn't fit the code that a package generated with another version of it",
        "pip install --upgrade tensorflow protobuf (or pin protobuf to the version that pip check asks for)",
        "setup",
    ),
    Rule(
        "keras3-legacy",
        ("has no attribute", "KerasTensor"),
        r"horovod[\s\S]*(?:'(?:Variable|KerasVariable|SymbolicTensor)' object has no attribute '(?P<attribute>ref|"
        r"assign|numpy)'"
        r"|has no attribute '(?P<gone>_?get_gradients|_compute_gradients|_aggregate_gradients|get_updates|_hvd\w*)'"
        r"|A KerasTensor cannot be used as input to a TensorFlow function)",
        "horovod.tensorflow (and its keras part) doesn't know Keras 3's variables and optimizers",
        "use hvdtrain.keras in place of horovod.tensorflow.keras (docs/keras.md), or TF_USE_LEGACY_KERAS=1 with "
        "tf-keras",
    ),
    Rule(
        "not-initialized",
        "Horovod has not been initialized",
        r"Horovod has not been initialized",
        "the program uses Horovod before hvd.init(), or after hvd.shutdown()",
        "call hvd.init() once at the start, from the same horovod.<framework> module that is used afterwards",
    ),
    Rule(
        "mismatched-shapes",
        "ismatched",
        r"Mismatched (?P<operation>\w+) tensor shapes: (?P<detail>.*)",
        "the ranks gave tensors of different shapes to one {operation}: {detail}",
        "make the shape the same on all ranks: drop the last incomplete batch, pad, or use allgather, which lets the "
        "first dimension differ",
    ),
    Rule(
        "mismatched-types",
        "ismatched",
        r"Mismatched data types: (?P<detail>.*)",
        "the ranks gave tensors of different types to one collective: {detail}",
        "cast the tensor to one type on all ranks before the call",
    ),
    Rule(
        "mismatched-operations",
        "ismatched",
        r"Mismatched (?:MPI )?(?:collective )?operations?: (?P<detail>.*)",
        "the ranks called different operations under one name: {detail}",
        "let all ranks run the same collectives in the same order; look for code that depends on hvd.rank()",
    ),
    Rule(
        "mismatched-other",
        "ismatched",
        r"Mismatched (?P<what>[\w /-]+?): (?P<detail>(?:One rank|.*rank).*)",
        "the ranks called one collective with different arguments ({what}): {detail}",
        "give the same arguments on all ranks; look for code that depends on hvd.rank()",
    ),
    Rule(
        "duplicate-name",
        ("with the same name", "Duplicate tensor name"),
        r"(?:Requested to \w+,? (?:\w+,? )*(?:or \w+ )?a tensor with the same name as another tensor|Duplicate "
        r"tensor name)[\s\S]{0,300}?(?:[Tt]ensor name:? ?(?P<tensor>\S+)|$)",
        "two collectives under one name are in flight at the same time",
        "give each call its own name=, or wait for the first (hvd.synchronize) before the second",
    ),
    Rule(
        "gradients-twice",
        "Gradients were computed more than backward_passes_per_step",
        r"Gradients were computed more than backward_passes_per_step times before call to step\(\)",
        "backward() ran more often than backward_passes_per_step before optimizer.step()",
        "hvd.DistributedOptimizer(…, backward_passes_per_step=N) with the N that is accumulated",
    ),
    Rule(
        "unsupported-type",
        "Tensor type",
        r"Tensor type (?P<type>[\w.]+) is not supported",
        "Horovod 0.28.1 can't reduce tensors of type {type}",
        "cast to float32 or float16 before the collective",
    ),
    Rule(
        "training-diverged",
        "the loss is",
        r"error: (?:(?P<where>[^\n]*?): )?(?P<what>[^\n]*the loss is (?:nan|-?inf)[^\n]*)",
        "training diverged: {what}",
        "lower options.lr, add warm-up epochs (options.warmup_epochs), or look at the data of that step",
    ),
    Rule(
        "bad-python",
        ("SyntaxError: ", "IndentationError: ", "TabError: "),
        r'File "(?P<file>[^"]+)", line (?P<line>\d+)[^\n]*\n(?:[ \t][^\n]*\n){0,3}'
        r"(?P<kind>SyntaxError|IndentationError|TabError): (?P<what>.*)",
        "{file} isn't valid Python at line {line}: {what}",
        "correct that line; if it is right, the host may run an older Python than the one that you use",
    ),
)
