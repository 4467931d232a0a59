"""Options of proxyd from a file and from variables: the same ones, checked in the same way."""

from __future__ import annotations

from pathlib import Path

import pytest
from proxied import python, run

from understudy.recovery.base.errors import BadInput
from understudy.recovery.base.yaml_file import LARGEST
from understudy.recovery.config.config_file import unknown_variables
from understudy.recovery.config.proxyd_options import ProxydOptions, proxyd_command
from understudy.recovery.config.proxyd_settings import options_of, settings_of


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNDERSTUDY_PROXYD_DEVICES", raising=False)


def of_file(folder: Path, text: str, *arguments: str) -> ProxydOptions:
    path = folder / "proxyd.yaml"
    path.write_text(text)
    return options_of(["--config", str(path), *arguments])


def test_a_file_says_what_a_command_line_would(tmp_path: Path) -> None:
    text = """
    # of this node
    devices: cpu:3
    spares: 2
    persist-every: 60
    snapshot-overhead: 2%
    exact: off
    optimizer-preimages: on
    persist: /var/lib/understudy
    """
    words = [
        "--devices", "cpu:3", "--spares", "2", "--persist-every", "60", "--snapshot-overhead", "2%",
        "--exact", "off", "--optimizer-preimages", "on",
        "--persist", "/var/lib/understudy",
    ]  # fmt: skip
    assert of_file(tmp_path, text) == options_of(words)
    given = settings_of(["--config", str(tmp_path / "proxyd.yaml"), "--persist", str(tmp_path)])
    assert given.devices.count == 3 and given.spares == 2


def test_the_command_line_comes_before_variables_and_those_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "devices: cpu:1\nspares: 1\nhang-timeout: 1\n"
    monkeypatch.setenv("UNDERSTUDY_PROXYD_SPARES", "2")
    monkeypatch.setenv("UNDERSTUDY_PROXYD_HANG_TIMEOUT", "2")
    given = of_file(tmp_path, text, "--hang-timeout", "3")
    assert (given.devices, given.spares, given.hang_timeout) == ("cpu:1", 2, "3")
    monkeypatch.setenv("UNDERSTUDY_PROXYD_CONFIG", str(tmp_path / "proxyd.yaml"))
    assert options_of([]).devices == "cpu:1"


WRONG = {
    "an option that there is not": ("device: cpu:1", "line 1: there is no option device: is devices meant"),
    "a list": ("devices: [cpu:1]", "devices wants a word or a number"),
    "nothing": ("devices:", "devices wants a word or a number"),
    "a word for a switch": (
        "devices: cpu:1\nlisten-anywhere: perhaps",
        "from --config .*; see proxyd --help",
    ),
    "the same twice": ("devices: cpu:1\nspares: 1\ndevices: cpu:2", "line 3: devices stands there twice"),
    "bytes": ("devices: !!binary Y3B1OjE=", "devices wants a word or a number"),
    "a word for a number": ("devices: cpu:1\nspares: many", "from --config .*proxyd.yaml; see proxyd --help"),
    "a word that is none of those": ("devices: cpu:1\nexact: maybe", "from --config .*; see proxyd --help"),
    "no options": ("- devices", "holds no options"),
    "no YAML": ("devices: 'cpu:1", ", line 1 is no YAML: "),
    "an object of Python's": (
        "devices: !!python/object/apply:os.system ['true']",
        "wants a word or a number",
    ),
    "what is far too long": ("#" * (LARGEST + 1), "is larger than 1 MiB"),
    "an option of the command line alone": ("config: other.yaml", "there is no option config"),
    "a key that is no word": ("7: cpu:1", "there is no option 7"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_in_a_file_is_told_in_a_sentence_that_names_the_place(
    what: str, tmp_path: Path
) -> None:
    text, sentence = WRONG[what]
    with pytest.raises(BadInput, match=sentence):
        of_file(tmp_path, text)


def test_a_file_that_is_not_there_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read: No such file"):
        options_of(["--config", str(tmp_path / "none")])


def test_a_variable_that_is_not_possible_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERSTUDY_PROXYD_SPARES", "many")
    with pytest.raises(BadInput, match="from the variable UNDERSTUDY_PROXYD_SPARES"):
        options_of(["--devices", "cpu:1"])


def test_a_variable_that_is_no_option_is_told_of() -> None:
    told = unknown_variables(
        {"UNDERSTUDY_PROXYD_SPARE": "1", "UNDERSTUDY_PROXYD_SPARES": "1", "OTHER": ""},
        "proxyd",
        proxyd_command(),
    )
    assert told == [
        "the environment variable UNDERSTUDY_PROXYD_SPARE is not known and has no effect: "
        "is UNDERSTUDY_PROXYD_SPARES meant?"
    ]


@pytest.mark.drawn(2)
def test_a_run_s_own_proxyd_has_nothing_of_the_machine_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would join a cluster, say, or have no devices."""
    monkeypatch.setenv("UNDERSTUDY_PROXYD_SPARES", "many")
    monkeypatch.setenv("UNDERSTUDY_PROXYD_CONFIG", str(tmp_path / "none"))
    script = tmp_path / "script.py"
    script.write_text("import torch\nprint('sum', torch.ones(3, device='cuda').sum().item())\n")
    ended = run(python(script), folder=tmp_path)
    assert ended.status == 0 and "sum 3.0" in ended.output, ended.output[-2000:]
