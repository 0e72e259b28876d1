"""Which variables reach the workers: a documented base, what the spec sets and forwards, and nothing else.

horovodrun by itself passes on everything that the launcher's shell has, tokens included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from hvdtrain.errors import UsageError

# What a program needs to find itself, its user and its language, and the settings of the numerical libraries, which
# hold no secrets and which users expect to work when they export them.
BASE = (
    "HOME", "LANG", "LANGUAGE", "LC_*", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER",
    "CONDA_PREFIX", "PYTHON*", "VIRTUAL_ENV", "XDG_*",
    "SSL_CERT_DIR", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE",
    "CUBLAS_*", "CUDA_*", "CUDNN_*", "GLOO_*", "HOROVOD_*", "KERAS_*", "KMP_*", "MKL_*", "NCCL_*", "NVIDIA_*",
    "OMPI_MCA_*", "OMP_*", "OPENBLAS_*", "PYTORCH_*", "TF_*", "TORCH_*", "UCX_*", "XLA_*",
)  # fmt: skip

# Horovod's and this launcher's own say about a worker. Inherited from an outer job they would mislead the inner one.
_PRIVATE = (
    "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_*", "HOROVOD_CROSS_*", "HOROVOD_HOSTNAME", "HOROVOD_GLOO_*",
    "HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "HOROVOD_ELASTIC", "HOROVOD_SECRET_KEY", "HVDTRAIN_*",
)  # fmt: skip


def matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """The names that match any of the patterns (``*`` and ``?`` as in a shell), sorted."""
    wanted = tuple(patterns)
    return sorted(name for name in names if any(fnmatchcase(name, pattern) for pattern in wanted))


def worker_environment(
    launcher: Mapping[str, str],
    *,
    python: str,
    set_values: Mapping[str, str],
    forward: Iterable[str],
    secrets: Iterable[str] = (),
) -> dict[str, str]:
    """The workers' variables without the secrets, which also no pattern lets in: base, then forwarded, then set.

    The interpreter's own folder comes first on PATH, so that ``command: [python, train.py]`` means the Python that
    Horovod was built for, also when its environment isn't activated.

    Raises:
        UsageError: a variable to forward isn't set (a pattern may match nothing).
    """
    _require(launcher, forward, key="env.forward")
    names = set(matching(launcher, (*BASE, *forward))) - set(matching(launcher, _PRIVATE)) - set(secrets)
    environment = {name: launcher[name] for name in names}
    folder = str(Path(python).parent)
    rest = environment.get("PATH", "/usr/local/bin:/usr/bin:/bin").split(":")
    environment["PATH"] = ":".join([folder, *(entry for entry in rest if entry != folder)])
    # Lines of a pipe wait in a buffer of the program's otherwise, and a killed rank's last words are lost.
    environment.setdefault("PYTHONUNBUFFERED", "1")
    return environment | dict(set_values)


def check_secrets(launcher: Mapping[str, str], names: Iterable[str]) -> None:
    """Every secret must have a value now.

    Raises:
        UsageError: one isn't set.
    """
    _require(launcher, names, key="env.secrets")


def _require(launcher: Mapping[str, str], names: Iterable[str], *, key: str) -> None:
    missing = [name for name in names if not set(name) & set("*?[") and name not in launcher]
    if missing:
        raise UsageError(
            f"{key}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set in the launcher's environment",
            fix=f"export {' '.join(missing)}, or take {'it' if len(missing) == 1 else 'them'} out of {key}",
        )
