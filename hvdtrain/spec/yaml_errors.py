"""What PyYAML's errors mean, in words for people who don't know YAML's grammar."""

from __future__ import annotations

import yaml

from hvdtrain.errors import Problem
from hvdtrain.spec.scalars import shown

# A part of PyYAML's or libyaml's message -> ours, and whether it belongs to the place where the construct began.
_EXPLANATIONS = (
    ("mapping values are not allowed", "no ': ' is expected here: indent all keys of a mapping alike, and put text "
     "that holds ': ' in quotes", False),
    ("entries are not allowed", "no '- ' is expected here: begin the list on its own line", False),
    ("',' or '}'", "this '{' isn't closed, a ',' is missing in it, or text with brackets or braces in it "
     "needs quotes", True),
    ("',' or ']'", "this '[' isn't closed, a ',' is missing in it, or text with brackets or braces in it "
     "needs quotes", True),
    ("unexpected end of stream", "this quote is never closed", True),
    ("unknown escape", "unknown escape in double quotes: write \\\\ for a backslash, or use single quotes", False),
    ("undefined alias", "no anchor '&' of this name stands before it: put text that begins with '*' in quotes", False),
    ("second occurrence", "an anchor '&' of this name exists already", False),
    ("alphabetic or numeric character", "a name is missing here: put text that begins with '*' or '&' in quotes", True),
    ("another document", "a second document begins here: a job spec is one document", False),
    ("<document start>", "a second document begins here: a job spec is one document", False),
    ("could not find expected", "this line has no ': ' after its key", True),
    ("undefined tag handle", "text that begins with '!' must be in quotes", False),
    ("node content", "a value is missing here, or it needs quotes", False),
    ("parsing a block mapping", "this doesn't fit what stands before it: indent all keys of a mapping alike, and "
     "double a quote inside quotes", False),
    ("parsing a block collection", "this doesn't fit the list before it: begin each item with '- ', or indent it "
     "further", False),
    ("maximum nesting depth", "lists and mappings are nested too deep", False),
)  # fmt: skip


def explain_yaml_error(error: yaml.MarkedYAMLError, text: str, source: str) -> Problem:
    """One sentence, with its place, on why a text isn't YAML."""
    problem = f"{error.context}: {error.problem}" if error.context else str(error.problem)
    mark = error.problem_mark or error.context_mark
    assert mark is not None
    at_mark = _characters_at(text, mark)
    message = None
    if at_mark[1:2] == "\t":
        message = "this is a tab, and YAML is indented with spaces: put spaces in its place"
    elif at_mark == "${":
        message = 'inside { } and [ ] a variable needs quotes: write "${NAME}"'
    elif "cannot start any token" in problem:
        message = f"text that begins with {shown(at_mark[1:2])} must be in quotes"
    else:
        for part, explanation, at_context in _EXPLANATIONS:
            if part in problem:
                message = explanation
                mark = (error.context_mark if at_context else None) or mark
                break
    return Problem(source, mark.line + 1, mark.column + 1, message or f"not valid YAML: {problem}")


def explain_reader_error(error: yaml.reader.ReaderError, text: str, source: str) -> Problem:
    """The same for a character that YAML doesn't allow."""
    found = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if found is None:
        return Problem(source, 0, 0, f"not valid YAML: {error.reason}")
    before = text[: found.start()]
    line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
    message = f"the character {shown(found[0])} can't stand in YAML: in double quotes its escape can"
    return Problem(source, line, column, message)


def _characters_at(text: str, mark: yaml.Mark) -> str:
    """The character before a mark on its line ('' at a line's begin becomes a space) and the one at it."""
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    return (line[mark.column - 1] if mark.column else " ") + line[mark.column : mark.column + 1]
