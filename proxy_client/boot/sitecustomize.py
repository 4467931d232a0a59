"""Runs in every Python that proxyrun's command starts; arranges the virtual device, then steps aside.

The folder of this file is all that proxyrun puts on PYTHONPATH. Nothing else of ours becomes importable by
it, and the sitecustomize that Python would have found without us still runs.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_CLIENT = "understudy.proxy_client"


def _load_client() -> None:
    """Loads the client from beside this folder, without touching sys.path. Does nothing a second time.

    No module `understudy` is put above it: an import of that name finds what it would have found without us
    (a script's own module, or all of ours where it is installed). Python asks only for the direct parent of
    what it imports, but for `from understudy.proxy_client import x`, which the package answers itself, and
    `import understudy.…`, which is not to be written in it.
    """
    if _CLIENT in sys.modules:
        return
    package = os.path.dirname(_HERE)
    spec = importlib.util.spec_from_file_location(
        _CLIENT, os.path.join(package, "__init__.py"), submodule_search_locations=[package]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"understudy: no client in {package}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_CLIENT] = module
    spec.loader.exec_module(module)

    from understudy.proxy_client import activation

    activation.install()


def _run_the_next_sitecustomize() -> None:
    others = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) != os.path.realpath(_HERE)]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if os.environ.get("UNDERSTUDY_JOB"):
    _load_client()
_run_the_next_sitecustomize()
