"""What proxyd and proxyrun make of --persist and its companions: snapshots, or one sentence why not."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from proxied import python, run
from running_proxyd import running_proxyd
from training_run import installed

from understudy.recovery.base.errors import BadInput
from understudy.recovery.config.proxyd_options import OF_PERSIST
from understudy.recovery.config.proxyd_settings import settings_of
from understudy.recovery.config.proxyrun_options import parse
from understudy.recovery.snapshots.restore.checking import problems_of
from understudy.recovery.snapshots.stores.catalogue import read_catalogue

pytestmark = pytest.mark.drawn(5)

MISTAKES = [
    (["--snapshot-overhead", "0"], r"--persist needs snapshots, which --snapshot-overhead 0 switches off"),
    (["--snapshot-overhead", "0%"], r"--persist needs snapshots, which --snapshot-overhead 0 switches off"),
    (["--persist-slots", "1"], r"--persist-slots 1 is not possible: 2 to 16"),
    (["--persist-slots", "17"], r"--persist-slots 17 is not possible: 2 to 16"),
    (["--persist-slots", "-3"], r"--persist-slots -3 is not possible: 2 to 16"),
    (["--persist-every", "0"], r"--persist-every '0' is no time"),
    (["--persist-every", "-1"], r"--persist-every '-1' is no time"),
    (["--persist-every", "soon"], r"--persist-every 'soon' is no time"),
    (["--persist-every", "1e9"], r"--persist-every '1e9' is no time"),
    (["--persist-every", "0steps"], r"--persist-every '0steps' is not possible"),
    (["--persist-every", "-5steps"], r"--persist-every '-5steps' is no time"),
    (["--persist-overhead", "3%"], r"--persist-overhead 3% is of no use without --persist-every auto"),
    (["--persist-every", "auto", "--persist-overhead", "0"], r"--persist-overhead '0' leaves no time for"),
    (["--persist-every", "auto", "--persist-overhead", "51%"], r"--persist-overhead '51%' is no share"),
    (["--persist-every", "auto", "--persist-overhead", "much"], r"--persist-overhead 'much' is no share"),
]
TRAIN_UNTIL_COMPLETE = """
import sys
from pathlib import Path
import torch
from understudy.recovery.snapshots.stores.catalogue import read_catalogue

store, runs = Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Linear(64, 64).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while len({one.run for one in read_catalogue(store).sets if one.complete}) < runs:
    model(torch.ones(2, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def equals(options: list[str]) -> list[str]:
    """`--flag=value`: a value may begin with a dash."""
    return [f"{flag}={value}" for flag, value in zip(options[::2], options[1::2], strict=True)]


def command(program: str, *options: str) -> tuple[int, str]:
    """Exit status, and what it says."""
    done = subprocess.run(
        [*installed(program), *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.parametrize(("options", "sentence"), MISTAKES, ids=lambda value: str(value)[:40])
def test_proxyd_refuses_what_is_not_possible_and_names_it(
    options: list[str], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=sentence):
        settings_of(["--devices", "cpu:1", "--persist", str(tmp_path), *equals(options)])


@pytest.mark.parametrize(
    "options",
    [
        ["--persist-slots", "16"],
        ["--persist-every", "1"],
        ["--persist-every", "90s"],
        ["--persist-every", "1step"],
        ["--persist-every", "auto", "--persist-overhead", "50%"],
    ],
    ids=str,
)
def test_proxyd_takes_what_lies_just_within(options: list[str], tmp_path: Path) -> None:
    settings = settings_of(["--devices", "cpu:1", "--persist", str(tmp_path / "a" / "b"), *options])
    assert settings.persist is not None and settings.persist.directory == tmp_path / "a" / "b"
    assert not list(tmp_path.iterdir()), "a proxyd that refuses to start leaves nothing"
    settings.persist.make_directory()
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_a_directory_that_cannot_be_made_or_written_is_named_by_either_command(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    expected = rf"--persist {file}/inside cannot be made: Not a directory\n"
    for program, options in (("proxyd", ["--devices", "cpu:1"]), ("proxyrun", [])):
        socket = tmp_path / "socket"
        rest = ["true"] if program == "proxyrun" else []
        status, said = command(
            program, *options, "--socket", str(socket), "--persist", str(file / "inside"), *rest
        )
        assert status == 2
        assert re.fullmatch(f"{program}: {expected}", said), said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_to_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(BadInput, match="cannot be written"):
        settings_of(["--devices", "cpu:1", "--persist", str(tmp_path)])


@pytest.mark.parametrize(
    "options",
    [
        ["--persist-every", "auto"], ["--persist-slots", "4"], ["--persist-overhead", "3%"],
        ["--mirror", "s3://bucket/prefix"], ["--keep-last", "2"], ["--keep-every", "100"],
    ],
    ids=str,
)  # fmt: skip
def test_proxyrun_refuses_companions_of_persist_without_it(options: list[str]) -> None:
    with pytest.raises(BadInput, match=f"{' '.join(options)} is of no use without --persist DIRECTORY"):
        parse([*options, "true"])


@pytest.mark.parametrize(("options", "sentence"), MISTAKES[::3], ids=lambda value: str(value)[:40])
def test_a_mistake_in_options_of_the_embedded_proxyd_is_one_sentence_of_proxyrun(
    options: list[str], sentence: str, tmp_path: Path
) -> None:
    status, said = command("proxyrun", f"--persist={tmp_path}", *equals(options), "true")
    assert status == 2
    assert re.fullmatch(rf"proxyrun: {sentence}.*\n", said), said


def test_proxyrun_refuses_to_persist_where_a_proxyd_already_decides(tmp_path: Path) -> None:
    with running_proxyd(tmp_path / "socket", 1) as proxyd:
        status, said = command(
            "proxyrun", "--socket", str(proxyd.socket), "--persist", str(tmp_path / "store"), "true"
        )
    assert status == 2 and said.count("\n") == 1
    assert "decides about --persist: leave out --persist, or stop it" in said
    assert not (tmp_path / "store").exists()


def test_proxyrun_persists_what_its_command_trains(tmp_path: Path) -> None:
    store = tmp_path / "store"
    for runs in (1, 2):  # the second is the same job, started anew
        ended = run(
            python("-P", "-c", TRAIN_UNTIL_COMPLETE, str(store), str(runs)), folder=tmp_path,
            options=(
                "--job", "night-7", "--persist", str(store), "--persist-every", "1", "--persist-slots", "2",
            ),
        )  # fmt: skip
        assert ended.status == 0, ended.output
        complete = [one for one in read_catalogue(store).sets if one.complete]
        assert problems_of(complete[0]) == []
        assert complete[0].world == 1 and complete[0].step > 0
        assert {one.job for one in complete} == {"night-7"}
        assert len({one.run for one in complete}) == runs


def test_a_job_has_a_name_that_fits_in_a_path(tmp_path: Path) -> None:
    status, said = command("proxyrun", "--job", "../night", "true")
    assert status == 2
    assert said == "proxyrun: --job '../night' is no name: letters, digits, - and _ only, at most 64\n"


@pytest.mark.parametrize("program", ["proxyd", "proxyrun"])
def test_what_needs_a_directory_is_refused_without_one(program: str, tmp_path: Path) -> None:
    rest = ["--devices", "cpu:1"] if program == "proxyd" else ["true"]
    for option in ("--persist-only", "--persist-log", "--persist-overhead=3%"):
        status, said = command(program, "--socket", str(tmp_path / "socket"), option, *rest)
        told = option.replace("=", " ")
        assert status == 2 and said == f"{program}: {told} is of no use without --persist DIRECTORY\n", said


@pytest.mark.parametrize("name", OF_PERSIST)
def test_no_option_of_persist_is_passed_over_in_silence(name: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    unlike = {"persist_only": [], "persist_log": [], "mirror": ["s3://a/b"], "persist_every": ["9"]}
    value = unlike.get(name, ["8"])
    with pytest.raises(BadInput, match=f"{flag}.* is of no use without --persist DIRECTORY"):
        settings_of(["--devices", "cpu:1", flag, *value])
