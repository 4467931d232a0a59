"""The contract between our processes: `control.proto` says which file describes what.

The build makes `NAME_pb2` and `NAME_pb2_grpc` of each (see CMakeLists.txt); they exist only in the installed
package.  `control_pb2` has the messages of all of them, `services` all services.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # so that checking the sources knows the name
    import understudy.protos.control_pb2 as control_pb2

__all__ = ["control_pb2"]
