"""What of the user's ssh configuration is read by hvdtrain itself."""

from pathlib import Path

import pytest

from hvdtrain.remote.ssh import mentions_host_key_checks


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, False),
        ({"config": "Host *\n  User ada\n#   StrictHostKeyChecking ask\n"}, False),
        ({"config": "Host *\n  stricthostkeychecking=no\n"}, True),
        ({"config": "Include {folder}/more/*.conf\n", "more/a.conf": "User ada\n"}, False),
        ({"config": "include {folder}/*/a.conf\n", "more/a.conf": "Host x\nStrictHostKeyChecking no\n"}, True),
        (
            {"config": "Include={folder}/b\n", "b": "Include {folder}/c {folder}/d\n", "d": "StrictHostKeyChecking no"},
            True,
        ),
        # What only ssh can resolve, and what has no end.
        ({"config": "Include ${{HOME}}/b\n"}, True),
        ({"config": 'Include "{folder}/two words"\n'}, True),
        ({"config": "Include {folder}/config\n"}, True),
    ],
)
def test_whether_host_key_checks_are_mentioned(tmp_path: Path, files: dict[str, str], expected: bool) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text.format(folder=tmp_path))
    assert mentions_host_key_checks(str(tmp_path / "config")) is expected
