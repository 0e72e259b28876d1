"""A plan as text: what will happen, why, and the command to paste."""

from __future__ import annotations

import re
import shlex

from hvdtrain.plan.plan import LaunchPlan

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ESCAPES = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\\": r"\\", "'": r"\'"}


def render(plan: LaunchPlan) -> str:
    """Reasons and placement as shell comments, then the command. The whole text can be pasted into bash."""
    lines = [f"# {plan.name}"]
    lines += [f"# {_CONTROL.sub(' ', reason)}" for reason in plan.reasons]
    lines.append(f"# run directory: {quote(plan.run_directory)}")
    if plan.secrets:
        lines.append(f"# without the secrets, which only the launch itself hands over: {', '.join(plan.secrets)}")
    if plan.elastic:
        lines.append("# an elastic job: the launch writes the files that this names, so it can't be pasted")
    return "\n".join([*lines, shell_command(plan)])


def shell_command(plan: LaunchPlan) -> str:
    """The exact command with its exact environment, for bash.

    ``env -i`` drops what the plan doesn't name. Secrets are left out: env's and horovodrun's command lines, where any
    user of a host can read them, are the only way that a pasted command has.
    """
    variables = [f"{quote(name)}={quote(value)}" for name, value in plan.environment.items()]
    environment = " \\\n  ".join(["env -i", *variables])
    command = " ".join(quote(argument) for argument in plan.argv)
    return f"cd {quote(plan.directory)} && {environment} \\\n  {command}"


def quote(text: str) -> str:
    """Quote for bash. Control characters are written as escapes, so that the text stays on its line."""
    if not _CONTROL.search(text):
        return shlex.quote(text)
    escaped = "".join(
        _ESCAPES.get(character) or (f"\\x{ord(character):02x}" if _CONTROL.match(character) else character)
        for character in text
    )
    return f"$'{escaped}'"
