"""Secrets don't show up where a job prints them."""

from __future__ import annotations

from hvdtrain.supervise.masking import masker


def test_values_are_replaced_wherever_they_stand() -> None:
    mask = masker(["s3cret", "s3cret-and-more", "a.b*c"])
    assert mask("token=s3cret; s3cret-and-more, a.b*c, axbbc") == "token=***; ***, ***, axbbc"


def test_each_line_of_a_key_is_a_secret() -> None:
    mask = masker(["-----BEGIN KEY-----\nAAAABBBB\n-----END KEY-----\n"])
    assert mask("key: AAAABBBB") == "key: ***"


def test_short_and_empty_values_stay() -> None:
    mask = masker(["", "1", "yes"])
    assert mask("step 1: yes") == "step 1: yes"
