"""recoveryctl certs: what is made is used, and what is wrong with certificates is told in one sentence."""

from __future__ import annotations

import os
import stat
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from understudy.recovery.base.errors import BadInput
from understudy.recovery.base.own_modules import module_command
from understudy.recovery.membership.network.certificates import (
    check_validity,
    issue,
    load,
    make_authority,
    show,
)

NOW = datetime.now(UTC)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """An authority, and a certificate for a host `a`."""
    directory = tmp_path / "certs"
    make_authority(directory, "tests")
    issue(directory, "a", ["10.0.0.1", "a.example"])
    return directory


def test_what_was_issued_is_loaded_and_keys_are_their_owners_alone(made: Path) -> None:
    credentials = load(made, "a")
    assert timedelta(days=364) < credentials.expires - NOW < timedelta(days=366)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in made.iterdir()}
    assert modes == {"ca.pem": 0o644, "ca.key": 0o600, "a.pem": 0o644, "a.key": 0o600}
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    told = {one.name: (one.addresses, one.problem) for one in show(made)}
    assert told == {"ca": ((), ""), "a": (("a", "10.0.0.1", "a.example"), "")}


def test_nothing_that_is_there_is_written_over(made: Path) -> None:
    before = {file.name: file.read_bytes() for file in made.iterdir()}
    with pytest.raises(BadInput, match=r"ca\.key exists already"):
        make_authority(made, "tests")
    with pytest.raises(BadInput, match=r"a\.key exists already"):
        issue(made, "a")
    assert before == {file.name: file.read_bytes() for file in made.iterdir()}


def _expired(made: Path) -> None:
    issue(made, "b", days=1, now=NOW - timedelta(days=2))


def _not_yet(made: Path) -> None:
    issue(made, "b", now=NOW + timedelta(hours=2))


def _others_authority(made: Path) -> None:
    make_authority(made / "other", "others")
    issue(made / "other", "b")
    for name in ("b.pem", "b.key"):
        (made / "other" / name).rename(made / name)


def _readable_key(made: Path) -> None:
    issue(made, "b")
    (made / "b.key").chmod(0o640)


def _others_key(made: Path) -> None:
    issue(made, "b")
    (made / "b.key").write_bytes((made / "a.key").read_bytes())


def _others_certificate(made: Path) -> None:
    for end in ("pem", "key"):
        (made / f"a.{end}").rename(made / f"b.{end}")


def _garbage(made: Path) -> None:
    issue(made, "b")
    (made / "b.pem").write_bytes(b"\0" * 100)


def _garbage_key(made: Path) -> None:
    issue(made, "b")
    (made / "b.key").write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")


def _no_key(made: Path) -> None:
    issue(made, "b")
    (made / "b.key").unlink()


def _no_authority(made: Path) -> None:
    (made / "ca.pem").unlink()


WRONG = [
    (_expired, "b.pem has expired on .*: issue another"),
    (_not_yet, "b.pem is not valid before .*, and the clock of this host says .*: set it"),
    (_others_authority, "b.pem is another authority's"),
    (_readable_key, r"b.key can be read by others \(mode 0640\): chmod 600"),
    (_others_key, "b.key is not the key of .*b.pem"),
    (_others_certificate, "b.pem is not a certificate for a host b"),
    (_garbage, "b.pem cannot be used: it holds no certificate"),
    (_garbage_key, "b.key cannot be used: it holds no key"),
    (_no_key, "there is no key .*b.key"),
    (_no_authority, "there is no certificate .*ca.pem: recoveryctl certs init makes one"),
    (lambda made: None, "there is no certificate .*b.pem: recoveryctl certs issue .* b makes one"),
]


@pytest.mark.parametrize(("spoil", "sentence"), WRONG, ids=[spoil.__name__ for spoil, _ in WRONG])
def test_wrong_certificates_are_told_in_one_sentence(made: Path, spoil: object, sentence: str) -> None:
    assert callable(spoil)
    spoil(made)
    with pytest.raises(BadInput, match=sentence) as caught:
        load(made, "b")
    assert "\n" not in str(caught.value)


def test_authority_that_has_expired_or_is_not_valid_yet_issues_nothing(tmp_path: Path) -> None:
    make_authority(tmp_path / "old", "tests", NOW - timedelta(days=4000))
    with pytest.raises(BadInput, match="has expired"):
        issue(tmp_path / "old", "a")
    make_authority(tmp_path / "new", "tests", NOW + timedelta(days=1))
    with pytest.raises(BadInput, match="is not valid before"):
        issue(tmp_path / "new", "a")


def test_validity_counts_to_the_second(made: Path) -> None:
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate((made / "a.pem").read_bytes())
    begins, expires = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    check_validity(certificate, made, begins)
    check_validity(certificate, made, expires)
    for moment in (begins - timedelta(seconds=1), expires + timedelta(seconds=1)):
        with pytest.raises(BadInput):
            check_validity(certificate, made, moment)


@pytest.mark.parametrize("name", ["", "ca", "a/b", "../a", "a" * 64, "a b"])
def test_impossible_names_are_refused(made: Path, name: str) -> None:
    with pytest.raises(BadInput, match="is no name for a host"):
        issue(made, name)


def test_commands_do_it_and_say_what_to_bring_where(tmp_path: Path) -> None:
    def certs(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*module_command("recovery.recoveryctl"), "certs", *arguments],
            capture_output=True, text=True, timeout=60, env=os.environ | {"COLUMNS": "200"},
        )  # fmt: skip

    directory = str(tmp_path / "certs")
    assert certs("init", directory).returncode == 0
    done = certs("issue", directory, "a", "--address", "10.0.0.1", "--days", "30")
    assert "bring them, and ca.pem, to a" in " ".join(done.stdout.split())
    again = certs("issue", directory, "a")
    assert again.returncode == 2 and len(again.stderr.strip().splitlines()) == 1
    assert "10.0.0.1" in certs("show", directory).stdout
    assert certs("issue", directory, "b", "--address", "a b").returncode == 2
    assert certs("issue", directory, "b", "--days", "0").returncode == 2
