"""Documents made to harm, or just strange: they end in an error or a spec, soon and without filling memory."""

from __future__ import annotations

import resource
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hvdtrain.errors import InputError
from hvdtrain.spec import yaml_reader
from hvdtrain.spec.loader import load_spec

HEAD = "task: a:B\noptions:\n"
TOO_LARGE = "more than 50000 values or 1 MiB of text"
TOO_DEEP = "nested"


def tower(first: str, line: str, floors: int) -> str:
    """Anchors that use the one before them."""
    return HEAD + first + "".join(line.format(here=here, below=here - 1) for here in range(1, floors))


BOMBS = {
    "aliases": (tower("  a0: &a0 [x]\n", "  a{here}: &a{here} [" + "*a{below}," * 10 + "]\n", 12), TOO_LARGE),
    "merges": (tower("  a0: &a0 {k: v}\n", "  a{here}: &a{here} {{<<: [" + "*a{below}," * 10 + "]}}\n", 12),
               TOO_LARGE),
    "aliases of a long text": (f"{HEAD}  a: &a {'x' * 500_000}\n  b: [{'*a,' * 40_000}]\n", TOO_LARGE),
    "tower of aliases": (tower("  a0: &a0 [x]\n", "  a{here}: &a{here} [*a{below}]\n", 5000), TOO_DEEP),
    "tower of merges": (tower("  a0: &a0 {}\n", "  a{here}: &a{here} {{<<: *a{below}}}\n", 5000), TOO_DEEP),
    "brackets": (HEAD + "  a: " + "[" * 500_000, TOO_DEEP),
    "braces": (HEAD + "  a: " + "{" * 500_000, TOO_DEEP),
    "lists in lists": (HEAD + "  a:\n    " + "- " * 300_000, TOO_DEEP),
    "mappings in mappings": ("".join(" " * depth + "a:\n" for depth in range(1000)), TOO_DEEP),
    "keys in keys": (HEAD + "  " + "? " * 300_000, TOO_DEEP),
    "many values": (HEAD + "  a:\n" + "  - a\n" * 150_000, TOO_LARGE),
    "many unknown keys": ("".join(f"k{number}:\n" for number in range(24_900)), "here are the first"),
    "many bad variables": ("task: a:B\nenv:\n  set:\n" + "".join(f"    {n}: x\n" for n in range(10_000)),
                           "here are the first"),
    "large file": ("task: a:B\n" + "#" * (1 << 20), "the file is larger than 1 MiB"),
    "long key": ("x" * 1_000_000 + ": 1", "no ': ' is expected here"),
    "variables": (HEAD + "  a: '" + "${X}" * 200_000 + "'", "variables would add more than 1 MiB of text"),
    "variables that never end": (HEAD + "  a: '" + "${" * 400_000 + "'", "can't read"),
}  # fmt: skip


def load(content: str | bytes, folder: Path) -> None:
    path = folder / "job.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", errors="surrogatepass"))
    load_spec(path, (), {"X": "y" * 100_000})


@pytest.mark.parametrize(("content", "message"), BOMBS.values(), ids=BOMBS.keys())
def test_a_bomb_ends_in_an_error(content: str, message: str, tmp_path: Path) -> None:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with pytest.raises(InputError, match=message):
        load(content, tmp_path)
    assert time.process_time() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 500 * 1024  # KiB


def test_the_largest_allowed_spec_loads(tmp_path: Path) -> None:
    load(HEAD + "  a:\n" + "  - a\n" * (yaml_reader.MAX_VALUES - 10), tmp_path)


def test_an_endless_file_is_read_to_its_limit() -> None:
    with pytest.raises(InputError, match="larger than 1 MiB"):
        load_spec(Path("/dev/zero"))


PIECES = st.sampled_from(
    ["task", "command", "options", "env", "set", "hosts", "list", "name", "directory", "checkpoint", ": ", ":", "- ",
     "[", "]", "{", "}", ",", "\n", "\n  ", "\t", "'", '"', "\\", "&a", "*a", "<<", "!", "!!str", "? ", "|", ">", "#",
     "${X}", "${Y:-1}", "${", "$${", "}", "~", "null", "yes", "1e-3", "0x1F", ".inf", ".nan", "-0", "1_0", "a:B",
     "---", "...", "%YAML 1.2", "@", "`", "\ufeff", "\x85", "\u2028", "\0", "é", "9" * 5000]
)  # fmt: skip
STRANGE_TEXT = st.one_of(st.text(), st.lists(PIECES, max_size=30).map("".join), st.binary())
NO_CHECKS = settings(
    deadline=2000, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@NO_CHECKS
@given(STRANGE_TEXT)
@example("options: {a: " + "9" * 5000 + "}\ntask: a:B")
@example("&a task: *a")
@example("<<: &a [*a]")
def test_any_text_is_a_spec_or_an_input_error(tmp_path: Path, content: str | bytes) -> None:
    with suppress(InputError):
        load(content, tmp_path)


KEYS = ["task", "command", "options", "name", "processes", "hosts", "env", "checkpoint", "horovod", "directory",
        "oversubscribe", "controller", "nonsense", "[key]"]  # fmt: skip
ANYTHING = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10), st.sampled_from(["a:B", "~"])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["file", "list", "set", "forward", "secrets", "keep", "X", "[key]"]), inner, max_size=4
        ),
    ),
    max_leaves=8,
)


@NO_CHECKS
@example({"[key]": 1})
@example({"env": {"set": {"[key]": 1}}, "options": {"[key]": float("nan")}})
@given(st.dictionaries(st.sampled_from(KEYS), ANYTHING, max_size=8))
def test_any_data_is_a_spec_or_an_input_error(tmp_path: Path, data: dict[str, object]) -> None:
    with suppress(InputError):
        load(yaml.safe_dump(data), tmp_path)


@NO_CHECKS
@given(st.lists(st.one_of(st.text(), st.lists(PIECES, max_size=12).map("".join)), max_size=3))
@example(["options.\udcff=1"])
@example(["name=\udcff"])
def test_any_override_is_taken_or_an_input_error(tmp_path: Path, overrides: list[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("task: a:B\nenv:\nhosts: {list: [a]}\n")
    with suppress(InputError):
        load_spec(path, overrides, {"X": "1"})
