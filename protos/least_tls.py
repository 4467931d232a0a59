"""TLS 1.3 is the least that this process speaks.  To be imported before anything that loads gRPC.

gRPC for Python cannot be told the least version, but which suites TLS 1.2 may use.  The one here needs a key
that both sides know beforehand, which nobody has, so only 1.3 is left.  gRPC reads the variable when it is
loaded; processes that we start are not to inherit it.
"""

import os
import sys

IN_FORCE = "grpc" not in sys.modules
_VARIABLE = "GRPC_SSL_CIPHER_SUITES"

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # as recovery/base/control.py, which comes later
_before = os.environ.get(_VARIABLE)
os.environ[_VARIABLE] = "ECDHE-PSK-AES128-CBC-SHA"
import grpc  # noqa: E402, F401

if _before is None:
    del os.environ[_VARIABLE]
else:
    os.environ[_VARIABLE] = _before
