"""A cluster's own certificate authority, and what it issues: a certificate per host, for both directions."""

from __future__ import annotations

import ipaddress
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from understudy.recovery.base.errors import BadInput
from understudy.recovery.membership.settings import is_name

AUTHORITY_DAYS = 3650
HOST_DAYS = 365
SKEW = timedelta(minutes=5)
"""By which a new certificate is valid earlier: clocks of hosts differ a little."""
_LARGEST = 1 << 20


@dataclass(frozen=True)
class Credentials:
    """What a host shows, and by what it checks others (PEM)."""

    host: str
    authority: bytes
    certificate: bytes
    key: bytes
    expires: datetime
    directory: Path


@dataclass(frozen=True)
class Issued:
    """A certificate as `recoveryctl certs show` tells of it."""

    name: str
    addresses: tuple[str, ...]
    begins: datetime
    expires: datetime
    problem: str


def authority_files(directory: Path) -> tuple[Path, Path]:
    """(certificate, key)."""
    return directory / "ca.pem", directory / "ca.key"


def host_files(directory: Path, host: str) -> tuple[Path, Path]:
    """(certificate, key)."""
    return directory / f"{host}.pem", directory / f"{host}.key"


def make_authority(directory: Path, cluster: str, now: datetime | None = None) -> None:
    """A new one, valid from now on; raises BadInput, if there is one already too."""
    certificate_file, key_file = authority_files(directory)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as problem:
        raise BadInput(f"{directory} cannot be made: {problem.strerror}") from problem
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"Understudy cluster {cluster}")
    builder = (
        _builder(name, name, key.public_key(), AUTHORITY_DAYS, now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
    )
    _write(key_file, _pem(key), 0o600)
    _write(certificate_file, _pem_of(builder.sign(key, hashes.SHA256())), 0o644)


def issue(
    directory: Path,
    host: str,
    addresses: Sequence[str] = (),
    days: int = HOST_DAYS,
    now: datetime | None = None,
) -> None:
    """A certificate and a key for a host, beside the authority's; raises BadInput."""
    if not is_name(host) or host == "ca":
        raise BadInput(f"{host!r} is no name for a host: letters, digits, . _ and - only, at most 63; not ca")
    if not 1 <= days <= AUTHORITY_DAYS:
        raise BadInput(f"--days {days} is not possible: 1 to {AUTHORITY_DAYS}")
    certificate_file, key_file = host_files(directory, host)
    authority_file, authority_key_file = authority_files(directory)
    authority = _certificate(authority_file, "recoveryctl certs init makes one")
    check_validity(authority, authority_file)
    authority_key = _private_key(authority_key_file)
    if authority_key.public_key() != authority.public_key():
        raise BadInput(f"{authority_key_file} is not the key of {authority_file}")
    key = ec.generate_private_key(ec.SECP256R1())
    names = [x509.DNSName(host), *(_general_name(address) for address in addresses)]
    builder = (
        _builder(_name(host), authority.subject, key.public_key(), days, now)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
            critical=False,
        )
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
        )
    )
    _write(key_file, _pem(key), 0o600)
    _write(certificate_file, _pem_of(builder.sign(authority_key, hashes.SHA256())), 0o644)


def load(directory: Path, host: str) -> Credentials:
    """A host's, checked; raises BadInput with what is wrong about them."""
    certificate_file, key_file = host_files(directory, host)
    authority_file, _ = authority_files(directory)
    authority = _certificate(authority_file, "recoveryctl certs init makes one")
    certificate = _certificate(certificate_file, f"recoveryctl certs issue {directory} {host} makes one")
    key = _private_key(key_file)
    if problem := _not_issued_by(certificate, authority):
        raise BadInput(f"{certificate_file} {problem}: it was not issued with {authority_file}")
    for one, file in ((authority, authority_file), (certificate, certificate_file)):
        check_validity(one, file)
    if key.public_key() != certificate.public_key():
        raise BadInput(f"{key_file} is not the key of {certificate_file}")
    if host not in _names(certificate):
        raise BadInput(f"{certificate_file} is not a certificate for a host {host}: {_names(certificate)}")
    expires = min(certificate.not_valid_after_utc, authority.not_valid_after_utc)
    return Credentials(host, _pem_of(authority), _pem_of(certificate), _pem(key), expires, directory)


def show(directory: Path) -> list[Issued]:
    """The authority's and all that lie beside it; raises BadInput."""
    authority_file, _ = authority_files(directory)
    authority = _certificate(authority_file, "recoveryctl certs init makes one")
    found = []
    for file in sorted(directory.glob("*.pem"), key=lambda file: (file != authority_file, file.name)):
        certificate = _certificate(file, "")
        problem = "" if file == authority_file else _not_issued_by(certificate, authority)
        try:
            check_validity(certificate, file)
        except BadInput as invalid:
            problem = problem or str(invalid)
        begins, expires = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        found.append(Issued(file.stem, tuple(_names(certificate)), begins, expires, problem))
    return found


def check_validity(certificate: x509.Certificate, file: Path, now: datetime | None = None) -> None:
    """Raises BadInput if it is not valid yet, or no more."""
    now = now or datetime.now(UTC)
    if now > certificate.not_valid_after_utc:
        raise BadInput(
            f"the certificate {file} has expired on {_told(certificate.not_valid_after_utc)}: "
            "issue another with recoveryctl certs"
        )
    if now < certificate.not_valid_before_utc:
        raise BadInput(
            f"the certificate {file} is not valid before {_told(certificate.not_valid_before_utc)}, and the "
            f"clock of this host says {_told(now)}: set it"
        )


def _told(moment: datetime) -> str:
    return moment.isoformat(" ", "seconds")


def _not_issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> str:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return "is another authority's"
    return ""


def _names(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    return [str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress)]


def _certificate(file: Path, advice: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(_read(file))
    except FileNotFoundError as problem:
        raise BadInput(f"there is no certificate {file}: {advice}") from problem
    except (OSError, ValueError) as problem:
        why = getattr(problem, "strerror", None) or "it holds no certificate"
        raise BadInput(f"{file} cannot be used: {why}") from problem


def _private_key(file: Path) -> ec.EllipticCurvePrivateKey:
    try:
        state = file.stat()
        if stat.S_IMODE(state.st_mode) & 0o077:
            mode = f"{stat.S_IMODE(state.st_mode):04o}"
            raise BadInput(f"the key {file} can be read by others (mode {mode}): chmod 600 {file}")
        if state.st_uid not in (os.getuid(), 0):
            raise BadInput(f"the key {file} belongs to another user")
        key = serialization.load_pem_private_key(_read(file), password=None)
    except FileNotFoundError as problem:
        raise BadInput(f"there is no key {file}") from problem
    except BadInput:
        raise
    except (OSError, ValueError, TypeError) as problem:
        why = getattr(problem, "strerror", None) or "it holds no key, or one under a password"
        raise BadInput(f"{file} cannot be used: {why}") from problem
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise BadInput(f"{file} cannot be used: recoveryctl certs makes keys of elliptic curves only")
    return key


def _read(file: Path) -> bytes:
    with open(file, "rb") as opened:
        return opened.read(_LARGEST)


def _write(file: Path, content: bytes, mode: int) -> None:
    """Never over another, and from the first moment on for those only who may read it."""
    try:
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as opened:
            opened.write(content)
    except FileExistsError as problem:
        raise BadInput(f"{file} exists already: move it away, or choose another directory") from problem
    except OSError as problem:
        raise BadInput(f"{file} cannot be written: {problem.strerror}") from problem


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int, now: datetime | None
) -> x509.CertificateBuilder:
    now = now or datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates, key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _general_name(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        if is_name(address):
            return x509.DNSName(address)
        raise BadInput(f"--address {address!r} is neither an IP address nor a name") from None


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _pem_of(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
