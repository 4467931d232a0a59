"""The address at which device servers of several hosts meet: what may be said, and who is told of it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from small_disks import own_mounts

from understudy.proxy_server.spawner import nccl_environment
from understudy.recovery.base.errors import BadInput
from understudy.recovery.base.own_modules import module_command
from understudy.recovery.config.cluster_options import membership_of, parse_data_address
from understudy.recovery.config.proxyd_settings import options_of
from understudy.recovery.membership.network.data_network import DataNetwork, data_network, interface_of
from understudy.recovery.membership.settings import MembershipSettings

LISTEN = "10.0.0.1:9400"
NOT_HERE = "192.0.2.7"  # of a network that exists in documents only


def settings(*arguments: str) -> MembershipSettings:
    return membership_of(options_of(["--devices", "cpu:1", "--host-name", "a", *arguments]))


def listening(listen: str, *more: str) -> tuple[str, ...]:
    return ("--etcd", "http://h", "--certs", "/x", "--listen", listen, *more)


def test_address_is_that_of_listen_unless_another_one_is_named() -> None:
    assert settings().data_address == "127.0.0.1"
    assert settings(*listening(LISTEN)).data_address == "10.0.0.1"
    assert settings(*listening("127.0.0.1:1")).data_address == "127.0.0.1"
    assert settings(*listening(LISTEN, "--data-address", "10.0.1.1")).data_address == "10.0.1.1"
    assert settings(*listening("[fd00::1]:1")).data_address == "fd00::1"


@pytest.mark.parametrize(
    ("address", "listen", "sentence"),
    [
        ("127.0.0.1", LISTEN, "is not reached by other hosts"),
        ("::1", LISTEN, "is not reached by other hosts"),
        ("::ffff:127.0.0.1", LISTEN, "is not reached by other hosts"),
        ("8.8.8.8", LISTEN, "say --listen-anywhere"),
        ("::ffff:8.8.8.8", LISTEN, "say --listen-anywhere"),
        ("2606:4700::1111", LISTEN, "say --listen-anywhere"),
        ("0.0.0.0", LISTEN, "by which another host could find"),
        ("224.0.0.1", LISTEN, "by which another host could find"),
        ("fe80::1", LISTEN, "by which another host could find"),
        ("host-1", LISTEN, "is no IP address"),
        ("10.0.0.1:9400", LISTEN, "is no IP address"),
        ("10.0.0.300", LISTEN, "is no IP address"),
        ("", "0.0.0.0:9400", "names no interface: name with --data-address"),
        ("", "[::]:9400", "names no interface: name with --data-address"),
    ],
)
def test_address_that_cannot_serve_is_refused_in_one_sentence(
    address: str, listen: str, sentence: str
) -> None:
    with pytest.raises(BadInput, match=re.escape(sentence)) as told:
        parse_data_address(address, listen, anywhere=False)
    assert "\n" not in str(told.value)


def test_public_address_is_taken_if_it_is_said_that_everybody_may_reach_it() -> None:
    assert parse_data_address("8.8.8.8", LISTEN, anywhere=True) == "8.8.8.8"
    assert parse_data_address("10.0.0.1", "0.0.0.0:9400", anywhere=True) == "10.0.0.1"


def test_address_without_other_hosts_is_of_no_use() -> None:
    with pytest.raises(BadInput, match="of no use without --listen"):
        settings("--data-address", "10.0.0.1")


def test_shared_directory_is_that_of_the_cluster_and_nobody_elses(tmp_path: Path) -> None:
    assert settings(*listening(LISTEN)).shared is None
    words = [*listening(LISTEN), "--shared-directory", str(tmp_path)]
    for _ in range(2):
        shared = settings(*words, "--cluster", "blue").shared
        assert shared is not None and shared == tmp_path / "blue" and shared.stat().st_mode & 0o777 == 0o700
    assert DataNetwork("10.0.0.1", "eth0", tmp_path, "a", shared).options[-2:] == [
        "--shared-directory",
        str(shared),
    ]
    (tmp_path / "blue").chmod(0o750)
    with pytest.raises(BadInput, match=r"blue must be this user's, and nobody else's \(0700\)"):
        settings(*words, "--cluster", "blue")


def test_shared_directory_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with own_mounts('mount -t tmpfs -o ro none "$0" && echo ready && read _', tmp_path) as helper:
        place = Path(f"/proc/{helper}/root{tmp_path}")
        with pytest.raises(BadInput, match="cannot be used: Read-only file system"):
            settings(*listening(LISTEN), "--shared-directory", str(place))
    (tmp_path / "default").mkdir(mode=0o700)
    script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && echo ready && read _'
    with own_mounts(script, tmp_path) as helper:
        place = Path(f"/proc/{helper}/root{tmp_path}")
        with pytest.raises(BadInput, match="default cannot be written"):
            settings(*listening(LISTEN), "--shared-directory", str(place))


def test_shared_directory_that_cannot_be_is_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for place, why in ((tmp_path / "none", "there is no such directory"), (file, "Not a directory")):
        with pytest.raises(BadInput, match=f"--shared-directory {place}.*{why}"):
            settings(*listening(LISTEN), "--shared-directory", str(place))
    with pytest.raises(BadInput, match="of no use without --listen"):
        settings("--shared-directory", str(tmp_path))


def test_address_of_no_interface_is_told_unless_jobs_are_to_be_adopted() -> None:
    elsewhere = MembershipSettings("a", data_address=NOT_HERE)
    with pytest.raises(BadInput, match=f"{NOT_HERE} is no address of this host"):
        data_network(elsewhere, must=True)
    assert data_network(elsewhere, must=False) == DataNetwork(NOT_HERE, "", None, "a")
    assert interface_of("127.0.0.1") == interface_of("::1") == "lo"


def test_nccl_is_confined_to_the_interface_of_the_address() -> None:
    assert nccl_environment("eth1")["NCCL_SOCKET_IFNAME"] == "=eth1"  # no other whose name begins so
    assert "NCCL_SOCKET_IFNAME" not in nccl_environment("")


def test_proxyd_with_an_address_that_this_host_has_not_ends_with_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [*module_command("recovery.proxyd"), "--devices", "cpu:1", "--socket",
         str(tmp_path / "s"), *listening(f"{NOT_HERE}:9400")],
        capture_output=True, text=True, timeout=60, env=os.environ,
    )  # fmt: skip
    assert done.returncode == 2
    (sentence,) = done.stderr.strip().splitlines()
    assert f"{NOT_HERE} is no address of this host" in sentence


def test_device_servers_are_told_the_address_and_nothing_else_by_default() -> None:
    assert DataNetwork().options == ["--data-address", "127.0.0.1", "--data-interface", "lo"]
    assert DataNetwork("10.0.0.1", "").options[1::2] == ["10.0.0.1", ""]
