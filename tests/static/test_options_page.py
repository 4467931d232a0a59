"""docs/options.md has every option, as the commands have them."""

from __future__ import annotations

import options_page


def test_the_page_is_that_of_the_commands() -> None:
    assert options_page.PAGE.read_text() == options_page.page(), "make options-page"


def test_every_option_of_proxyd_is_on_it() -> None:
    text = options_page.PAGE.read_text()
    for flag in ("--devices", "--persist-every", "--cpu-image-every", "--etcd", "--config", "--drill"):
        assert f"`{flag}" in text
    assert "recoveryctl snapshots" in text and "UNDERSTUDY_SOCKET" in text
