"""The certificate authority of an installation: a folder with `tls.crt` and `tls.key`.

The names are those of a Secret of type kubernetes.io/tls. The gateway signs a certificate for each
worker on another machine. `tandem tls` makes the folder, and certificates for agents."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tandem.errors import InvalidRequest, describe
from tandem.protocol.certificate import GATEWAY_NAME, Certificate

_CLOCKS_DIFFER = timedelta(days=1)
_LIFETIME = timedelta(days=3650)
"""A worker keeps its certificate for life. There is no revocation: a new authority replaces it."""


class Authority:
    """Signs certificates. Example: `Authority.read(folder).issue("trainer-s-ab12-0")`."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key
        self.pem = certificate.public_bytes(Encoding.PEM).decode()

    @classmethod
    def create(cls, folder: Path) -> Authority:
        """Write the folder's two files. Raises `InvalidRequest` if they exist or cannot be
        written."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name("tandem authority")
        now = datetime.now(UTC)
        usage = x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCKS_DIFFER)
            .not_valid_after(now + _LIFETIME)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(key, hashes.SHA256())
        )
        made = cls(certificate, key)
        _write(folder, {"tls.crt": made.pem, "tls.key": _pem_of(key)})
        return made

    @classmethod
    def read(cls, folder: Path) -> Authority:
        """Raises `InvalidRequest`."""
        try:
            certificate = x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes())
            key = load_pem_private_key((folder / "tls.key").read_bytes(), password=None)
        except OSError as error:
            raise InvalidRequest(
                f"the certificate authority cannot be read: {error.filename}: {error.strerror}; "
                f"make one: tandem tls create {folder}"
            ) from error
        except (ValueError, TypeError) as error:
            raise InvalidRequest(
                f"{folder} has no certificate authority in tls.crt and tls.key: {describe(error)}"
            ) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise InvalidRequest(f"the key of the authority in {folder} is no ECDSA key")
        if key.public_key() != certificate.public_key():
            raise InvalidRequest(f"tls.key of {folder} is not the key of its tls.crt")
        return cls(certificate, key)

    def issue(self, name: str) -> Certificate:
        """Return a new certificate: a client's if `name` is the gateway's, else a server's."""
        key = ec.generate_private_key(ec.SECP256R1())
        oids = ExtendedKeyUsageOID
        usage = oids.CLIENT_AUTH if name == GATEWAY_NAME else oids.SERVER_AUTH
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_name(name[:64]))  # X.509's maximum
            .issuer_name(self._certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCKS_DIFFER)
            .not_valid_after(min(now + _LIFETIME, self._certificate.not_valid_after_utc))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        pem = certificate.public_bytes(Encoding.PEM).decode()
        return Certificate(certificate=pem, key=_pem_of(key), authority=self.pem)


def write_certificate(folder: Path, made: Certificate) -> None:
    """Write the files for `read_certificate`. Raises `InvalidRequest` if they exist or cannot be
    written."""
    files = {"tls.crt": made.certificate, "tls.key": made.key, "ca.crt": made.authority}
    _write(folder, files)


def _write(folder: Path, files: dict[str, str]) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, text in files.items():
            fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "w") as file:
                file.write(text)
    except FileExistsError as error:
        raise InvalidRequest(f"there is already a {error.filename}") from error
    except OSError as error:
        raise InvalidRequest(f"{error.filename or folder}: {error.strerror}") from error


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem_of(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
