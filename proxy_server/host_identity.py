"""What a device server shows to those of other hosts, and by what it knows them: its host's certificates."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import grpc


@dataclass(frozen=True)
class HostIdentity:
    """proxyd has checked these files; they are read anew for each connection, so that renewed ones count."""

    directory: Path
    host: str

    def of_server(self) -> grpc.ServerCredentials:
        """Whoever calls must have a certificate of the same authority; raises OSError.

        A device server outlives the proxyd that started it, and certificates: files that cannot be read, or
        do not fit, leave those in force that it has.
        """

        def newest() -> grpc.ServerCertificateConfiguration | None:
            try:
                return self._configuration()
            except OSError as problem:
                sys.stderr.write(f"understudy: the former certificates stay in force: {problem}\n")
                return None

        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), newest, require_client_authentication=True
        )

    def of_client(self) -> grpc.ChannelCredentials:
        """Raises OSError."""
        authority, certificate, key = self._read()
        return grpc.ssl_channel_credentials(authority, key, certificate)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        authority, certificate, key = self._read()
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)

    def _read(self) -> tuple[bytes, bytes, bytes]:
        names = ("ca.pem", f"{self.host}.pem", f"{self.host}.key")
        authority, certificate, key = ((self.directory / name).read_bytes() for name in names)
        return authority, certificate, key
